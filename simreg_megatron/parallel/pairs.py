# SPDX-License-Identifier: Apache-2.0
"""SimReg's terms over ranks that share a sequence: hidden states travel, their gradients never do.

The matrix H of `kernels.contrast` is symmetric: what the anchors of other ranks do to a row of this rank follows from
two numbers of each of them. So the backward gathers 8 bytes a token, takes the rows once more, and finds the complete
gradient of its own rows in float32, which is rounded once. Between forward and backward no row of another rank is kept.

Forward, each pair of tokens on different ranks is computed on one of them, for both, and 16 bytes a token are summed.
If the exponentials are few enough to be kept for the backward, each rank computes all that it will need instead; so too
if context parallelism cuts documents, as such a row has many short runs, and pairs of runs would be too many.

Shapes: S rows of this rank, B micro-batch, D hidden, A anchors of this rank, K tokens in a view; c chunks of k tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from simreg_megatron.kernels.contrast import ForwardResult, Kernels, Saved, Span, Tokens, without_spent_pairs
from simreg_megatron.losses._chunks import Stretch, joined, stretches
from simreg_megatron.losses.roles import TokenRoles
from simreg_megatron.parallel.layout import RowPlan, Run, shared_pairs
from simreg_megatron.parallel.shard import SequenceShard


class View(NamedTuple):
    """Some anchors of this rank and all tokens that they meet: whole chunks from their first token on."""

    run: Run  # of the tokens, on the sequence
    embeddings: Tensor  # [B, K, D]; without a gradient where SimReg's kernels compute it
    labels: Tensor  # [B, K]
    usable: Tensor  # [B, K] bool
    documents: Tensor | None  # [B, K]
    anchors: Span  # positions inside K
    roles: TokenRoles  # of the anchors, [B, A]
    output_rows: Tensor | None = None  # [B, K, D], the output layer's row for each label, where states meet these


Part = tuple[View, Stretch]  # and chunks of its tokens


class KernelSetup(NamedTuple):
    chunk_size: int
    temperature: float
    kernels: Kernels


def terms_over_ranks(
    hidden_states: Tensor, views: Sequence[View], shard: SequenceShard, plan: RowPlan, setup: KernelSetup
) -> Tensor:
    """Compute log(1 + S_neg / S_pos) of this rank's anchors [B, A]; `hidden_states` get all ranks' gradients.

    A collective wherever the plan exchanges rows, and where tensor ranks share the work.

    Args:
        hidden_states: [S, B, D] of this rank.
        views: with `shard.gather_rows_detached(hidden_states, plan)`, in the order of this rank's rows.
    """
    return _SimReg.apply(hidden_states, views, shard, plan, setup)


class _SimReg(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_states: Tensor, views: Sequence[View], shard: SequenceShard, plan: RowPlan, setup: KernelSetup
    ) -> Tensor:
        parts = [
            (view, stretch)
            for view in views
            for stretch in stretches(view.run[1] - view.run[0], setup.chunk_size, view.anchors)
        ]
        save = ctx.needs_input_grad[0] and _saves_pairs(hidden_states, shard, setup)
        results = _forward(parts, shard, plan, setup, save=save)
        slopes = joined([each.slopes.flatten(2) for each in results], dim=2)
        ctx.save_for_backward(hidden_states, slopes, *[tensor for each in results for tensor in each.saved])
        ctx.options, ctx.is_spent = ([(view.run, stretch) for view, stretch in parts], shard, plan, setup), False
        return joined([each.terms.flatten(1) for each in results])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _gradient(ctx, grads[0]), None, None, None, None


def _gradient(ctx: Any, grad_terms: Tensor) -> Tensor:
    """Compute the gradient of this rank's rows."""
    hidden_states, slopes_2BA, *tensors = ctx.saved_tensors
    parts, shard, plan, setup = ctx.options
    kernels, size = setup.kernels, len(Saved._fields)
    saved = without_spent_pairs(ctx, [Saved(*tensors[first : first + size]) for first in range(0, len(tensors), size)])

    coeffs_SB2 = shard.from_all_anchors((grad_terms * slopes_2BA).permute(2, 1, 0))
    coeffs = (shard.gather_all if plan.travels else shard.located)(coeffs_SB2.transpose(0, 1))

    rows = shard.gather_rows_detached(hidden_states, plan)
    grad_ABD = hidden_states.new_empty(slopes_2BA.shape[2], *hidden_states.shape[1:])
    first = 0
    for (run, stretch), each in zip(parts, saved, strict=True):
        coeffs_of_all = stretch.chunks(coeffs.at(run)).movedim(-1, 0)
        shape = *each.label_ids.shape[:2], stretch.inside[1] - stretch.inside[0]  # [b, c, p]
        last = first + shape[1] * shape[2]
        grad = grad_ABD[first:last].transpose(0, 1).view(*shape, grad_ABD.shape[2])
        kernels.backward(stretch.chunks(rows.at(run)), each, coeffs_of_all, stretch.inside, setup.temperature, grad)
        first = last
    return shard.from_all_anchors(grad_ABD)


def _saves_pairs(hidden_states: Tensor, shard: SequenceShard, setup: KernelSetup) -> bool:
    """Return whether the exponentials stay between forward and backward: by what all ranks know, so that all agree."""
    layout = shard.layout
    chunk = min(setup.chunk_size or layout.length, layout.length)
    num_pairs = hidden_states.shape[1] * layout.length * chunk
    per_rank = num_pairs // (layout.context_size * layout.tensor_size)
    return setup.kernels.saves_pairs(hidden_states, per_rank, chunk)


def _forward(
    parts: Sequence[Part], shard: SequenceShard, plan: RowPlan, setup: KernelSetup, *, save: bool
) -> list[ForwardResult]:
    """Compute the terms of every part; if ranks share the pairs, each is computed on one of them: then a collective."""
    kernels, tau = setup.kernels, setup.temperature
    shares = plan.shares_chunks and not save and shard.layout.cu_seqlens is None
    local = []
    for view, stretch in parts:
        tokens = Tokens(*map(stretch.chunks, (view.embeddings, view.labels, view.usable, view.documents)))
        rectangles = _rectangles(view, stretch, plan) if shares else None
        local.append(kernels.pair_sums(tokens, stretch.inside, tau, rectangles, save=save))
    if shares:
        local = _sum(local, parts, shard)
    return [kernels.finish(*sums, stretch.inside, tau) for sums, (_, stretch) in zip(local, parts, strict=True)]


def _rectangles(view: View, stretch: Stretch, plan: RowPlan) -> list[tuple[Span, Span]]:
    """Choose the pairs with anchors of other ranks that are computed here, by position in the chunk."""
    start, stop = (view.run[0] + place for place in stretch.tokens)
    if stop - start > stretch.length:  # several chunks hold nothing but anchors of this rank
        return []
    own = start + stretch.inside[0], start + stretch.inside[1]
    rectangles = shared_pairs((start, stop), own, plan.all_anchors)
    return [((i - start, j - start), (k - start, m - start)) for (i, j), (k, m) in rectangles]


def _sum(local: list[tuple[Saved, Tensor]], parts: Sequence[Part], shard: SequenceShard) -> list[tuple[Saved, Tensor]]:
    """Add up the sums of all ranks. A collective."""
    labels = parts[0][0].labels
    totals = torch.zeros(2, labels.shape[0], shard.layout.length, dtype=torch.float64, device=labels.device)
    chunks = [totals[:, :, view.run[0] :][:, :, slice(*stretch.tokens)] for view, stretch in parts]
    for chunk, (_, sums) in zip(chunks, local, strict=True):
        chunk.add_(sums.flatten(2))
    for group in shard.anchor_groups:
        dist.all_reduce(totals, group=group)
    return [
        (saved, chunk.view(2, *saved.label_ids.shape)[..., slice(*stretch.inside)])
        for chunk, (saved, _), (_, stretch) in zip(chunks, local, parts, strict=True)
    ]
