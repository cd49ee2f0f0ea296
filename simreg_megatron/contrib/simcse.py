# SPDX-License-Identifier: Apache-2.0
"""SimCSE, a baseline without labels, and what it shares with others that compare whole sequences.

Two views of each sequence, and a softmax over those of the others. Everything is a sum over tokens until the last step,
so that ranks which share a sequence can add theirs up.

Shapes: b sequences of this rank, s sequences that they are compared with (b, or those of all data-parallel ranks), n
tokens, d features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from simreg_megatron.config import SimRegConfig
from simreg_megatron.contrib.shared import Replicas, check_one_number, own_tokens, sum_over, sum_over_sequence
from simreg_megatron.kernels.precision import no_autocast, product
from simreg_megatron.losses._anchored import check_choice, check_temperature, unit_rows
from simreg_megatron.losses._chunks import at_least_float32, checked
from simreg_megatron.objectives import ExampleSettings, Kind, Objective
from simreg_megatron.parallel.pairs import View
from simreg_megatron.parallel.shard import SequenceShard

VIEWS = ("halves", "dropout")
POOLINGS = ("mean", "last")
DROPOUT = 0.1
LARGEST_SCALE = 100.0  # upper limit of a learned scale of the cosines


def simcse_loss(
    embeddings: Tensor,
    labels: Tensor | None = None,
    *,
    temperature: float = 0.05,
    view: str = "halves",
    pooling: str = "mean",
    valid: Tensor | None = None,
) -> Tensor:
    """L = mean_i -log( exp(cos(h_i, g_i) / tau) / sum_j exp(cos(h_i, g_j) / tau) ).

    Args:
        embeddings: [b, n, d] or [n, d]; at least two sequences, else the loss is 0.
        labels: integer [b, n]; view "dropout" draws its masks from them, so that a sequence has the same ones
            wherever it is; without labels all sequences have the same masks. A label below 0 makes a token invalid.
        temperature: tau, above 0.
        view: what h_i and g_i are. "halves": the pooled states of the first and of the second half of sequence i.
            "dropout": those of the whole sequence under two masks that drop a tenth of the features; a sequence that
            comes again has the same masks again.
        pooling: "mean" of the valid tokens, or the "last" of them.
        valid: bool [b, n]; a sequence needs a valid token in each half, or at all, to take part.

    Raises:
        ValueError: an argument is out of range, or shapes or types do not fit.

    Source: our adaptation of Gao et al. 2021 to pretraining. Theirs are two passes of the model with other dropout;
    pretraining has none and pays for one pass, so both views are our choice, as is masking the pooled state.
    """
    check_temperature("temperature", temperature)
    check_choice("view", view, VIEWS)
    check_choice("pooling", pooling, POOLINGS)
    embeddings, labels, usable, _ = checked(embeddings, labels, valid)
    first, second, takes_part = whole_sequences(embeddings, labels, usable, view=view, pooling=pooling)
    losses = sequence_losses(first, second, takes_part, takes_part, 0, temperature)
    return losses.sum() / takes_part.sum().clamp(min=1)


class Pooled(NamedTuple):
    """Sums over two parts of each sequence; those of ranks add up, and so do counts and fingerprints."""

    sums: Tensor  # [b, 2, d]
    counts: Tensor  # [b, 2]
    fingerprints: Tensor  # int64 [b]: of the labels, the same in every layout


def last_positions(usable: Tensor, positions: Tensor, in_second: Tensor) -> Tensor:
    """Find the last position with a usable token in each part, [b, 2]; -1 if there is none. Of ranks: the maximum."""
    parts = torch.stack([~in_second, in_second])
    return torch.where(usable.unsqueeze(1) & parts, positions, -1).amax(dim=-1)


def pooled(
    embeddings: Tensor, labels: Tensor, usable: Tensor, positions: Tensor, in_second: Tensor, last: Tensor | None
) -> Pooled:
    """Sum up the usable tokens of each part.

    Args:
        embeddings: [b, n, d], some or all tokens of the sequences.
        labels, usable: [b, n].
        positions: int64 [n], on the sequence.
        in_second: bool [n], which tokens belong to the second part.
        last: [b, 2] from `last_positions`, to take that token alone; None takes all.
    """
    members = usable.unsqueeze(1) & torch.stack([~in_second, in_second])
    if last is not None:
        members = members & (positions == last.unsqueeze(-1))
    rows = at_least_float32(embeddings)
    rows = torch.where(usable.unsqueeze(-1), rows, 0.0)
    with no_autocast(embeddings.device.type):
        sums = product(members.to(rows.dtype), rows)
    mixed = _mixed(labels.long() + (positions << 32))
    return Pooled(sums, members.sum(dim=-1), torch.where(usable, mixed, 0).sum(dim=-1))


def two_views(given: Pooled, view: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return both views [b, d] of each sequence, and which sequences have them: bool [b].

    "halves": the means of the two parts. "dropout": the mean of the first part (the whole sequence) under two masks,
    drawn from the sequence itself, so that they are the same in every layout and no generator is touched.
    """
    counts = given.counts if view == "halves" else given.counts[:, :1]
    sums = given.sums if view == "halves" else given.sums[:, :1]
    takes_part = (counts > 0).all(dim=-1) & (sums.detach() != 0).any(dim=-1).all(dim=-1)
    means = torch.where(takes_part[:, None, None], sums / counts.clamp(min=1).unsqueeze(-1), 1.0)
    if view == "dropout":
        means = means * _dropout_masks(given.fingerprints, means.shape[-1]).to(means.dtype)
        takes_part = takes_part & (means.detach() != 0).any(dim=-1).all(dim=-1)  # of few features, all may be dropped
        means = torch.where(takes_part[:, None, None], means, 1.0)
    first, second = means.unbind(dim=1)
    return first, second, takes_part


def sequence_losses(
    own: Tensor, others: Tensor, takes_part: Tensor, others_take_part: Tensor, place: int, temperature: float | Tensor
) -> Tensor:
    """-log softmax_j( cos(own_i, others_j) / tau ) at j = place + i, [b]; 0 where a sequence does not take part."""
    with no_autocast(own.device.type):
        logits = product(unit_rows(own), unit_rows(others).mT) / temperature
    nothing = torch.finfo(logits.dtype).min / 4
    # log(1 + sum over the others), so that a loss below the rounding of the logits is not lost; a NaN stays one.
    itself = logits.diagonal(place)
    others = (logits - itself.unsqueeze(-1)).masked_fill(~others_take_part, nothing)
    others = others.diagonal_scatter(itself.detach() * 0.0 + nothing, place)
    return torch.where(takes_part, -F.logsigmoid(-others.logsumexp(dim=-1)), 0.0)


def whole_sequences(
    embeddings: Tensor, labels: Tensor, usable: Tensor, *, view: str, pooling: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `two_views` of sequences that are whole on this rank."""
    positions = torch.arange(embeddings.shape[1], device=embeddings.device)
    in_second = positions >= first_part(embeddings.shape[1], view)
    last = last_positions(usable, positions, in_second) if pooling == "last" else None
    return two_views(pooled(embeddings, labels, usable, positions, in_second, last), view)


def first_part(length: int, view: str) -> int:
    """Return the number of tokens in the first part of a sequence."""
    return (length + 1) // 2 if view == "halves" else length


def _dropout_masks(fingerprints: Tensor, width: int) -> Tensor:
    """Draw two masks for each sequence, [b, 2, d]: 0 with probability DROPOUT, else 1 / (1 - DROPOUT)."""
    numbers = torch.arange(2 * width, device=fingerprints.device).view(2, width)
    mixed = _mixed(_mixed(fingerprints)[:, None, None] + numbers)
    uniform = ((mixed >> 20) & 0xFFFFFF).double() / 2**24
    return (uniform >= DROPOUT) / (1 - DROPOUT)


def _mixed(numbers: Tensor) -> Tensor:
    """Hash each int64 to one that looks random (the finalizer of MurmurHash3; products wrap around)."""
    for factor in (-49064778989728563, -4265267296055464877):
        numbers = (numbers ^ ((numbers >> 33) & 0x7FFFFFFF)) * factor
    return numbers ^ ((numbers >> 33) & 0x7FFFFFFF)


def scaled(temperature: float, log_scale: Tensor | None) -> float | Tensor:
    """tau, or exp(-min(theta, log 100)) of a trained theta, with derivative 1 inside, or it would stay beyond."""
    check_temperature("temperature", temperature)
    check_one_number("log_scale", log_scale)
    if log_scale is None:
        return temperature
    return (-(log_scale - (log_scale.detach() - math.log(LARGEST_SCALE)).clamp(min=0))).exp()


def simcse_terms(
    config: SimRegConfig, views: list[View], shard: SequenceShard, learned: Mapping[str, Tensor], replicas: Replicas,
    symmetric: bool = False,
) -> Tensor:  # fmt: skip
    """Give every usable token the loss of its sequence, [B, A]; `symmetric` takes the mean of both directions."""
    view, (embeddings, labels, usable, positions) = str(config.options.get("view", "halves")), own_tokens(views, shard)
    in_second, last = positions >= first_part(shard.layout.length, view), None
    if config.options.get("pooling") == "last":
        last = last_positions(usable, positions, in_second)
        for group in shard.anchor_groups:
            dist.all_reduce(last, op=dist.ReduceOp.MAX, group=group)
    parts = pooled(embeddings, labels, usable, positions, in_second, last)
    whole = Pooled._make(sum_over_sequence(part, shard) for part in parts)
    first, second, takes_part = two_views(whole, view)
    temperature = scaled(config.tau, learned.get("log_scale"))
    place, others = 0, (first, second, takes_part)
    if config.options.get("gather") == "yes":
        place, others = _gather_replicas(first, second, takes_part, replicas())
    losses = sequence_losses(first, others[1], takes_part, others[2], place, temperature)
    if symmetric:
        back = sequence_losses(second, others[0], takes_part, others[2], place, temperature)
        losses = (losses + back) / 2
    return torch.where(usable, losses.unsqueeze(-1), 0.0)


def _gather_replicas(
    first: Tensor, second: Tensor, takes_part: Tensor, group: dist.ProcessGroup
) -> tuple[int, tuple[Tensor, Tensor, Tensor]]:
    """Gather the sequences of all data-parallel ranks [s, ...], and return where this rank's begin among them.

    Backward: every replica's loss reaches the sequences of every other.
    """
    place = group.rank() * len(first)

    def gathered(own: Tensor) -> Tensor:
        whole = own.new_zeros(group.size() * len(own), *own.shape[1:])
        whole[place : place + len(own)] = own
        return sum_over(whole, group)

    return place, (gathered(first), gathered(second), gathered(takes_part.int()) > 0)


SIMCSE = Objective(
    name="simcse", kind=Kind.SEQUENCES, temperature=0.05, terms=simcse_terms,
    asks="two views of a sequence closer than other sequences", labels="no", sent="sums of states of each sequence",
    options={"view": VIEWS, "pooling": POOLINGS, "gather": ("no", "yes")},
    takes_rows=lambda options: True,
    example=ExampleSettings(chunk_size=None), invariant=("rotation", "names"),
)  # fmt: skip
