# SPDX-License-Identifier: Apache-2.0
"""AdaGC: every parameter is clipped by its own history of norms (arXiv 2502.11034), as SimReg's runs are.

    h_i = rel * gamma_i / (||g_i|| + eps) if ||g_i|| > rel * gamma_i, else 1;    g_i <- h_i g_i
    gamma_i <- beta * gamma_i + (1 - beta) * min(||g_i||, rel * gamma_i)

and during a warm-up, while the gammas are found,

    h = min(1, abs / (||g|| + eps)),  ||g||^2 = sum_i ||g_i||^2;    gamma_i <- min(gamma_i, h ||g_i||).

eps is 1e-6. Shapes: N parameters, one entry each, in an order that the caller keeps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_EPS = 1e-6
_UNSEEN = torch.inf  # the gamma of a parameter that had no gradient yet: the first norm lies below


class ClipResult(NamedTuple):
    """Result of clipping one step."""

    coefficients: Tensor  # [N], each at most 1
    global_norm: Tensor  # 0-d, before clipping


class AdaGC:
    """Coefficients from norms, and the moving averages behind them.

    Args:
        lambda_rel: rel, how far above its average a norm may rise.
        lambda_abs: abs, the largest global norm of a warm-up step.
        beta: of the moving average.
        warmup_iters: steps of the warm-up.
        variant: "clipped" as above; "raw": during the warm-up gamma follows the norm before clipping; "global": one
            average, of the global norm, for all parameters.
        separate: bool [N], parameters that have a global norm of their own in the warm-up.

    Source: Wang et al., AdaGC, arXiv 2502.11034; eps and the warm-up's constants are those of the authors' public
    Megatron patch. That a parameter without a gradient keeps its gamma is our choice: a minimum of 0 would freeze it.
    """

    def __init__(
        self,
        num_parameters: int,
        *,
        lambda_rel: float = 1.04,
        lambda_abs: float = 1.0,
        beta: float = 0.99,
        warmup_iters: int = 100,
        variant: str = "clipped",
        separate: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.lambda_rel, self.lambda_abs, self.beta = lambda_rel, lambda_abs, beta
        self.warmup_iters, self.variant, self._separate = warmup_iters, variant, separate
        self.steps = 0
        self.gammas = torch.full((1 if variant == "global" else num_parameters,), _UNSEEN, device=device)

    def step(self, squares: Tensor) -> ClipResult:
        """Take the squared norms [N] of one step's gradients; nothing waits for the device.

        Where they are not all finite, no average moves; it is the caller who leaves such a step out.
        """
        norms, global_norm = squares.to(self.gammas).sqrt(), squares.sum().sqrt().to(self.gammas)
        own = global_norm.view(1) if self.variant == "global" else norms
        self.steps += 1
        if self.steps <= self.warmup_iters:
            global_norms = global_norm
            if self._separate is not None:
                separate, main = (torch.where(mask, squares, 0.0).sum() for mask in (self._separate, ~self._separate))
                global_norms = torch.where(self._separate, separate, main).sqrt().to(self.gammas)
            coefficients = (self.lambda_abs / (global_norms + _EPS)).clamp(max=1.0)
            gammas = torch.minimum(self.gammas, own if self.variant == "raw" else coefficients * own)
        else:
            before = torch.where(self.gammas.isinf(), own, self.gammas)
            limits = self.lambda_rel * before
            coefficients = torch.where(own > limits, limits / (own + _EPS), 1.0)
            gammas = self.beta * before + (1 - self.beta) * torch.minimum(own, limits)
        self.gammas = torch.where((own > 0) & global_norm.isfinite(), gammas, self.gammas)
        return ClipResult(coefficients.expand(norms.shape), global_norm)
