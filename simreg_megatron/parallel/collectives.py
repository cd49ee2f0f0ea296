# SPDX-License-Identifier: Apache-2.0
"""Differentiable steps between ranks, each of which says what its backward does; and `add_gradient`, for a loss.

All sum gradients in float32 (or wider) and in an order that does not depend on timing, so that replicas of a
parameter receive the same bits.

Shapes: S rows of this rank, N rows needed here, B micro-batch, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from simreg_megatron.losses._chunks import at_least_float32
from simreg_megatron.parallel.layout import RowPlan, Run


@torch.no_grad()
def all_to_all_rows(rows_SBD: Tensor, plan: RowPlan, group: dist.ProcessGroup) -> Tensor:
    """Exchange rows as `exchange_rows` does, in their own type and without a gradient."""
    sent = _taken(rows_SBD, [local for ranges in plan.send for local in ranges])
    received = rows_SBD.new_empty((sum(plan.receive_sizes), *rows_SBD.shape[1:]))
    dist.all_to_all_single(received, sent, list(plan.receive_sizes), list(plan.send_sizes), group=group)
    del sent  # before all rows are here a second time, in order
    return _taken(received, plan.order)


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_SBD: Tensor, plan: RowPlan, group: dist.ProcessGroup) -> Tensor:
        ctx.plan, ctx.group, ctx.shape, ctx.dtype = plan, group, rows_SBD.shape, rows_SBD.dtype
        return at_least_float32(all_to_all_rows(rows_SBD, plan, group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad_NBD,) = grads
        plan: RowPlan = ctx.plan
        to_owners = grad_NBD.new_empty(grad_NBD.shape)
        position = 0
        for first, last in plan.order:
            to_owners[first:last] = grad_NBD[position : position + last - first]
            position += last - first
        returned = grad_NBD.new_empty((sum(plan.send_sizes), *ctx.shape[1:]))
        dist.all_to_all_single(returned, to_owners, list(plan.send_sizes), list(plan.receive_sizes), group=ctx.group)
        grad_SBD = grad_NBD.new_zeros(ctx.shape)
        position = 0
        for ranges in plan.send:  # in the order of ranks, not of arrival
            for first, last in ranges:
                grad_SBD[first:last] += returned[position : position + last - first]
                position += last - first
        return grad_SBD.to(ctx.dtype), None, None


def exchange_rows(rows_SBD: Tensor, plan: RowPlan, group: dist.ProcessGroup) -> Tensor:
    """Bring the rows of `plan.needs` here, in the order of the sequence: [S, B, D] -> [N, B, D], at least float32.

    Rows go only to ranks that need them. Backward: every rank returns the gradients of the rows it was sent, and
    their owner sums them. Where all need all, these are an all-gather and a reduce-scatter.
    """
    return _ExchangeRows.apply(rows_SBD, plan, group)


class _ShareWork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.dtype = group, rows.dtype
        return at_least_float32(rows.view_as(rows))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].clone(memory_format=torch.contiguous_format)  # autograd may hand the same tensor to others
        dist.all_reduce(grad, group=ctx.group)
        return grad.to(ctx.dtype), None


def share_work(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the rows, at least float32. Backward: sum the gradients of all ranks of the group.

    For ranks that hold the same rows and compute different anchors: each then has the gradient of all of them.
    """
    return _ShareWork.apply(rows, group)


@torch.no_grad()
def gather(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the tensors of all ranks: [S, ...] of each rank, S the same on all -> [ranks * S, ...]."""
    gathered = own.new_empty((group.size() * own.shape[0], *own.shape[1:]))
    dist.all_gather_into_tensor(gathered, own.contiguous(), group=group)
    return gathered


def gather_tokens(per_token_SB: Tensor, order: tuple[Run, ...], group: dist.ProcessGroup) -> Tensor:
    """Gather numbers of all ranks' tokens in the order of the sequence: [S, ...] of each rank -> [T, ...]."""
    return _taken(gather(per_token_SB, group), order)


def _taken(rows: Tensor, ranges: Sequence[Run]) -> Tensor:
    """Concatenate the row ranges."""
    return torch.cat([rows[first:last] for first, last in ranges]) if ranges else rows[:0].contiguous()


@torch.no_grad()
def quantiles_over(values: Tensor, shares: Sequence[float], groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """Find, for each share [q], the smallest of all ranks' numbers [n] that this share of them does not exceed.

    NaN are left out; without others it is NaN. A collective over one group after the other. Waits for the device.
    """
    for group in groups:
        most = torch.tensor(len(values), device=values.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        padding = values.new_full((int(most) - len(values),), torch.nan)
        values = gather(torch.cat([values, padding]), group)
    ordered = values[~values.isnan()].sort().values
    if not len(ordered):
        return values.new_full((len(shares),), torch.nan)
    places = (len(ordered) * torch.tensor(shares, dtype=torch.float64) - 1e-9).ceil().long().clamp(min=1)
    return ordered[places.to(values.device) - 1]


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
    """Return the value of `loss` with the gradient of `loss + weight * term`.

    All that Megatron multiplies the per-token loss with afterwards (mask, 1/tokens, 1/micro-batches, fp16 loss scale)
    reaches the term in the same measure, while log, NaN checks and rerun machine see the language-model loss alone.

    Args:
        loss_BS: per-token loss.
        term_BS: per-token term; may cover only the columns `start : start + term_BS.shape[1]` of the loss.
        weight: a number, or a tensor [] without a gradient.
        start: first column of the loss that the term belongs to.
    """
    return _AddGradient.apply(loss_BS, term_BS, weight, start)
