# SPDX-License-Identifier: Apache-2.0
"""Differentiable steps between ranks and between losses; each says what its backward does.

Shapes: S local sequence, B micro-batch, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _GatherSequence(torch.autograd.Function):
    """Forward: concatenate all ranks' rows. Backward: sum all ranks' gradients, keep the own rows."""

    @staticmethod
    def forward(ctx: Any, local_SBD: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        rows = local_SBD.shape[0] * group.size()
        gathered = local_SBD.new_empty((rows, *local_SBD.shape[1:]))
        dist.all_gather_into_tensor(gathered, local_SBD.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        local = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(local, grad.contiguous(), group=ctx.group)
        return local, None


def gather_sequence(local_SBD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather along dimension 0 in rank order; the backward is the reduce-scatter (sum).

    Right when every rank uses its own part of the result as anchors: each anchor's gradient reaches all rows once.
    """
    return _GatherSequence.apply(local_SBD, group)


class _AddGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, term: Tensor, start: int) -> Tensor:
        ctx.columns = slice(start, start + term.shape[1])
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grads
        return grad, grad[:, ctx.columns], None


def add_gradient(loss_BS: Tensor, term_BS: Tensor, *, start: int = 0) -> Tensor:
    """Value of `loss`, gradient of `loss + term`.

    Whatever Megatron multiplies the per-token loss with afterwards (mask, 1/tokens, 1/micro-batches, context
    parallel factor, fp16 loss scale) reaches the term in the same measure, while the logged loss, the NaN checks
    and the rerun machine see the language-model loss alone.

    Args:
        loss_BS: per-token loss.
        term_BS: per-token term; may cover only the columns `start : start + term_BS.shape[1]` of the loss.
        start: first column of the loss that the term belongs to.
    """
    return _AddGradient.apply(loss_BS, term_BS, start)
