# SPDX-License-Identifier: Apache-2.0
"""A loss, or states, that keep their value and take on a term's gradient.

Shapes: B micro-batch, S tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _AddGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, term: Tensor, weight: float | Tensor, start: int) -> Tensor:
        ctx.columns, ctx.weight, ctx.dtype = slice(start, start + term.shape[1]), weight, term.dtype
        # The same memory under another node. Not a view: autograd refuses to change one in place, and a loop may do
        # that to its loss. It then finds what it would without SimReg, and nothing is copied.
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (grad,) = grads
        return grad, grad[:, ctx.columns].to(ctx.dtype) * ctx.weight, None, None


def add_gradient(loss_BS: Tensor, term_BS: Tensor, weight: float | Tensor = 1.0, *, start: int = 0) -> Tensor:
    """Value of `loss`, gradient of `loss + weight * term`.

    All that Megatron multiplies the per-token loss with afterwards (mask, 1/tokens, 1/micro-batches, context
    parallel factor, fp16 loss scale) reaches the term in the same measure, while the logged loss, the NaN checks
    and the rerun machine see the language-model loss alone.

    Args:
        loss_BS: per-token loss.
        term_BS: per-token term; may cover only the columns `start : start + term_BS.shape[1]` of the loss.
        weight: a number, or a tensor [] without a gradient.
        start: first column of the loss that the term belongs to.
    """
    return _AddGradient.apply(loss_BS, term_BS, weight, start)
