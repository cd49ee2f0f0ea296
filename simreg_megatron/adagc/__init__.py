# SPDX-License-Identifier: Apache-2.0
"""AdaGC: every parameter is clipped by its own history of norms (arXiv 2502.11034), as SimReg's runs are.

    h_i = min(1, rel * gamma_i / ||g_i||)                        g_i <- h_i g_i
    gamma_i <- beta * gamma_i + (1 - beta) * h_i ||g_i||

and during a warm-up, while the gammas are found,

    h = min(1, abs / ||g||),  ||g||^2 = sum_i ||g_i||^2           gamma_i <- min(gamma_i, h ||g_i||).

Shapes: N parameters, one entry each, in an order that the caller keeps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_EPS = 1e-6
_UNSEEN = torch.inf  # the gamma of a parameter that had no gradient yet: the first norm lies below


class Clipped(NamedTuple):
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
        apart: bool [N], parameters that have a global norm of their own in the warm-up.

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
        apart: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.lambda_rel, self.lambda_abs, self.beta = lambda_rel, lambda_abs, beta
        self.warmup_iters, self.variant, self._apart = warmup_iters, variant, apart
        self.steps = 0
        self.gammas = torch.full((1 if variant == "global" else num_parameters,), _UNSEEN, device=device)

    def step(self, squares: Tensor) -> Clipped:
        """Take the squared norms [N] of one step's gradients; nothing waits for the device.

        Where they are not all finite, no average moves; it is the caller who leaves such a step out.
        """
        norms, global_norm = squares.to(self.gammas).sqrt(), squares.sum().sqrt().to(self.gammas)
        own = global_norm.view(1) if self.variant == "global" else norms
        self.steps += 1
        if self.steps <= self.warmup_iters:
            global_norms = global_norm
            if self._apart is not None:
                theirs, others = (torch.where(some, squares, 0.0).sum() for some in (self._apart, ~self._apart))
                global_norms = torch.where(self._apart, theirs, others).sqrt().to(self.gammas)
            coefficients = (self.lambda_abs / (global_norms + _EPS)).clamp(max=1.0)
            gammas = torch.minimum(self.gammas, own if self.variant == "raw" else coefficients * own)
        else:
            before = torch.where(self.gammas.isinf(), own, self.gammas)
            limits = self.lambda_rel * before
            coefficients = torch.where(own > limits, limits / (own + _EPS), 1.0)
            gammas = self.beta * before + (1 - self.beta) * torch.minimum(own, limits)
        self.gammas = torch.where((own > 0) & global_norm.isfinite(), gammas, self.gammas)
        return Clipped(coefficients.expand(norms.shape), global_norm)
