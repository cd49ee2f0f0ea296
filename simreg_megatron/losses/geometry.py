# SPDX-License-Identifier: Apache-2.0
"""Diagnostics of hidden states: how close tokens of equal and of different labels lie, and how long states are.

Sums and counts, never means: they add up over micro-batches and ranks, and one place divides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from simreg_megatron.kernels.precision import no_autocast, product
from simreg_megatron.losses._chunks import Block, Span, Stretch, by_sequence, checked, chunk_length, joined, stretches
from simreg_megatron.losses.roles import label_ids, pair_counts

AT_ONCE = {"cpu": 64 << 20, "cuda": 512 << 20}
"""Bytes that measuring may take in a log step: enough for a whole micro-batch of the presets."""
_WORKSPACE = {"cpu": 64 << 20, "cuda": 176 << 20}  # bytes that the pairs of one step may take
_LOST = 512  # units of rounding, of the mean square: what variance equal tokens seem to have, with some room


class RowCosines(NamedTuple):
    """Per anchor [b, p], over the other tokens that it meets."""

    same: Tensor  # sum of cosines with tokens of its label
    different: Tensor  # of other labels
    hardest: Tensor  # the largest of these; meaningless where there are none


class PairCosines(NamedTuple):
    """Sums and counts as float64 scalars on the device of the embeddings; ordered pairs i != j."""

    same_sum: Tensor  # cosine over pairs of the same label
    same_count: Tensor
    different_sum: Tensor  # cosine over pairs of different labels
    different_count: Tensor
    hardest_sum: Tensor  # over tokens: the largest cosine with a token of another label
    hardest_count: Tensor  # tokens that have one


@torch.no_grad()
def pair_cosines(
    embeddings: Tensor, labels: Tensor, *, valid: Tensor | None = None, documents: Tensor | None = None,
    chunk_size: int = 0, anchors: Span | None = None,
) -> PairCosines:  # fmt: skip
    """Compute sums and counts of cos(e_i, e_j) over the pairs that simreg_loss compares.

    Nothing is read on the host, and no gradient is kept.

    Args:
        embeddings: [b, n, d] or [n, d]; cosines are taken in float32 (float64 for float64).
        labels, valid, documents, chunk_size: as in simreg_loss; the same tokens are left out, the same chunks are cut.
        anchors: (first, last) positions of i, for a rank that counts its own tokens only; None is all.
    """
    embeddings, labels, usable, documents = checked(embeddings, labels, valid, documents, chunk_size)
    anchors = (0, labels.shape[1]) if anchors is None else anchors
    options: dict[str, Any] = {"documents": documents, "chunk_size": chunk_size}
    same, different = (count[:, slice(*anchors)] for count in pair_counts(labels, usable, **options))
    sums = cosine_sums(row_cosines(embeddings, labels, usable, anchors=anchors, **options), same, different)
    return PairCosines._make(sums.unbind())


def cosine_sums(cosines: RowCosines, same: Tensor, different: Tensor) -> Tensor:
    """Add up to PairCosines [6]; `same` and `different` [b, p] count the partners of each anchor."""
    has = different > 0
    hardest = cosines.hardest.masked_fill(~has, 0.0)
    parts = torch.stack([cosines.same, same, cosines.different, different, hardest, has])
    return parts.sum(dim=(-2, -1), dtype=torch.float64)


@torch.no_grad()
def row_cosines(
    embeddings: Tensor, labels: Tensor, usable: Tensor, *, documents: Tensor | None, chunk_size: int, anchors: Span
) -> RowCosines:
    """Compute RowCosines of the anchors; `usable` [b, n] is from `usable_tokens`, all else as in `pair_cosines`."""
    at_once = _fitting(chunk_length(embeddings.shape[1], chunk_size), embeddings)  # sequences, of which a chunk fits
    if at_once < len(embeddings):
        parts = zip(*(each.split(at_once) for each in (embeddings, labels, usable)), strict=True)
        borders = itertools.repeat(None) if documents is None else iter(documents.split(at_once))
        options: dict[str, Any] = {"chunk_size": chunk_size, "anchors": anchors}
        results = [row_cosines(*part, documents=next(borders), **options) for part in parts]
        return RowCosines._make(map(torch.cat, zip(*results, strict=True)))
    dtype = torch.promote_types(embeddings.dtype, torch.float32)
    nothing = [embeddings.new_zeros((len(labels), 0), dtype=dtype)] * len(RowCosines._fields)
    ids, of_stretches = label_ids(labels, usable, documents), []
    with no_autocast(embeddings.device.type):
        for stretch in _parts(stretches(labels.shape[1], chunk_size, anchors), embeddings):
            block = _block_of_units(stretch, embeddings, ids, usable, documents)
            strips = [_strip(block, span) for span in _strips(block)]
            of_stretches.append([by_sequence(joined(part), len(labels)) for part in zip(*strips, strict=True)])
    return RowCosines._make(map(joined, zip(*(of_stretches or [nothing]), strict=True)))


def _fitting(tokens: int, embeddings: Tensor) -> int:
    at_once = AT_ONCE.get(embeddings.device.type, AT_ONCE["cuda"])
    return max(1, at_once // max(1, tokens * embeddings.shape[-1] * 2 * max(4, embeddings.dtype.itemsize)))


def _parts(whole: Iterable[Stretch], embeddings: Tensor) -> Iterator[Stretch]:
    """Cut stretches into parts of as many chunks as fit, at least one."""
    for stretch in whole:
        (first, last), length, inside = stretch
        step = length * _fitting(len(embeddings) * length, embeddings)
        yield from (Stretch((start, min(start + step, last)), length, inside) for start in range(first, last, step))


def _block_of_units(
    stretch: Stretch, embeddings: Tensor, ids: Tensor, usable: Tensor, documents: Tensor | None
) -> Block:
    """Make rows unit vectors, or zeros if a token is not usable: its cosine is then 0 with all."""
    rows, ids, usable = (stretch.chunks(part).flatten(0, 1) for part in (embeddings, ids, usable))
    norms = row_norms(rows).unsqueeze(-1)
    units = rows.to(torch.promote_types(rows.dtype, torch.float32), copy=True)
    units.div_(norms.to(units.dtype)).masked_fill_(~usable.unsqueeze(-1), 0.0)
    documents = None if documents is None else stretch.chunks(documents).flatten(0, 1)
    return Block(units, ids, usable, documents, stretch.inside)


def _strips(block: Block) -> Iterator[Span]:
    """Cut the anchors into parts whose cosines fit into the workspace, with a copy of them and masks."""
    workspace = _WORKSPACE.get(block.rows.device.type, _WORKSPACE["cuda"])
    step = max(1, workspace // max(1, block.labels.numel() * (2 * block.rows.dtype.itemsize + 4)))
    for first in range(block.anchors[0], block.anchors[1], step):
        yield first, min(first + step, block.anchors[1])


def _strip(block: Block, anchors: Span) -> tuple[Tensor, Tensor, Tensor]:
    """Compute RowCosines of some anchors of the chunks, [m, p]."""
    own = slice(*anchors)
    cosines = product(block.rows[:, own], block.rows.mT)
    cosines.diagonal(anchors[0], -2, -1).zero_()
    excluded = same = block.labels[:, own].unsqueeze(-1) == block.labels.unsqueeze(-2)
    of_label = (cosines * same).sum(dim=-1)
    if block.documents is not None:
        excluded = same | (block.documents[:, own].unsqueeze(-1) != block.documents.unsqueeze(-2))
    of_others = cosines.masked_fill_(excluded, 0.0).sum(dim=-1)
    hardest = cosines.masked_fill_(excluded | ~block.usable.unsqueeze(-2), -math.inf).amax(dim=-1)
    return of_label, of_others, hardest


class Moments(NamedTuple):
    """Sums over some hidden states, in their dtype (at least float32); those of ranks and micro-batches add up."""

    number: Tensor
    total: Tensor  # sum x, [d]
    units: Tensor  # sum x / |x|, [d]
    products: Tensor  # sum x x^T, [d, d]


class Isotropy(NamedTuple):
    """Measures of how evenly hidden states fill their space; NaN for fewer than two tokens. Score and rank are also NaN
    if all variance is lost in the rounding of the sums, as for identical tokens."""

    score: Tensor  # IsoScore: 0 where all variance lies along one direction, 1 where it is the same along all
    effective_rank: Tensor  # participation ratio (tr C)^2 / tr C^2 of the covariance C, from 1 to d
    mean_cosine: Tensor  # over all pairs of different tokens


@torch.no_grad()
def moments(embeddings: Tensor, valid: Tensor) -> Moments:
    """Sum over the valid tokens [...] of embeddings [..., d]; a zero vector has no direction, and is left out."""
    rows = embeddings.detach().flatten(0, -2)
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    norms = row_norms(rows)
    counts = valid.flatten() & (norms != 0)
    left_out = ~counts
    rows = rows.masked_fill(left_out.unsqueeze(-1), 0.0)
    inverse = norms.reciprocal_().masked_fill_(left_out, 0.0).to(rows.dtype)
    with no_autocast(rows.device.type):
        units, products = product(inverse, rows), product(rows.mT, rows)
    return Moments(counts.sum(dtype=rows.dtype), rows.sum(dim=0), units, products)


@torch.no_grad()
def isotropy(sums: Moments) -> Isotropy:
    """score = (r - 1) / (d - 1), rank r = (tr C)^2 / tr C^2, mean cosine = (|sum u|^2 - n) / (n (n - 1)).

    C is the covariance of the states, u are their unit vectors.

    The score's own definition rotates to principal axes, normalizes the variances, measures their distance from even
    ones and rescales it twice; all that comes to this ratio, which needs no axes. With fewer tokens than features no
    more than n - 1 directions can be seen: the rank is then that of the sample.

    Source: Rudman, Gillman, Rayne and Eickhoff 2022 (IsoScore).
    """
    number, width = torch.where(sums.number > 1, sums.number, math.nan), len(sums.total)
    mean = sums.total / number
    covariance = torch.addr(sums.products / number, mean, mean, alpha=-1)
    variance, size = covariance.trace(), sums.products.trace() / number
    rank = variance.square() / covariance.square().sum()
    rank = torch.where(variance > _LOST * torch.finfo(rank.dtype).eps * size, rank, math.nan)
    cosine = (sums.units.square().sum() - number) / (number * (number - 1))
    return Isotropy((rank - 1) / (width - 1), rank, cosine)


def row_norms(rows: Tensor) -> Tensor:
    """Compute |row| of [..., d] in float64: [...]. A part at a time, as torch first copies all rows to float64."""
    if rows.dim() < 2 or not rows.numel():
        return torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
    dim = max(range(rows.dim() - 1), key=lambda place: rows.shape[place])
    at_once = AT_ONCE.get(rows.device.type, AT_ONCE["cuda"])
    step = max(1, at_once // (16 * (rows.numel() // rows.shape[dim])))  # 16 bytes a number: two copies in float64
    parts = [torch.linalg.vector_norm(part, dim=-1, dtype=torch.float64) for part in rows.split(step, dim)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class NormSums(NamedTuple):
    """Sums over the norms of a set of tokens, or [...] of several sets: float64 on the device of the embeddings."""

    number: Tensor
    total: Tensor
    squares: Tensor


@torch.no_grad()
def norm_table(embeddings: Tensor, weights: Tensor) -> Tensor:
    """Sum 1, |e_i| and |e_i|^2, each times the weight of its token: a NormSums as a tensor [..., 3].

    Args:
        embeddings: [n..., d]; norms are taken in float64. A token of weight 0 may hold anything.
        weights: bool or numbers [..., n...]: whether, or how often, a token counts.
    """
    norms = row_norms(embeddings.detach())
    tokens = tuple(range(-norms.dim(), 0))
    norms, weights = norms.masked_fill(weights == 0, 0.0), weights.double()
    totals = weights * norms
    return torch.stack([weights, totals, totals * norms], dim=-1).sum(dim=tuple(place - 1 for place in tokens))


def mean_norm(sums: NormSums) -> Tensor:
    """Mean; NaN where nothing was counted."""
    return sums.total / sums.number


def coefficient_of_variation(sums: NormSums) -> Tensor:
    """CV = std / mean, with the standard deviation of the whole population: at least 0.1 says something, below 0.05 is
    noise by the source."""
    mean = mean_norm(sums)
    return (sums.squares / sums.number - mean.square()).clamp(min=0).sqrt() / mean


def cohens_d(one: NormSums, other: NormSums) -> Tensor:
    """d = (mean_1 - mean_2) / s, s^2 = ((n_1 - 1) s_1^2 + (n_2 - 1) s_2^2) / (n_1 + n_2 - 2), s_1 and s_2 unbiased.

    How far the norms of two groups of tokens lie apart: below 0.2 negligible, from 0.8 large. Which standard deviation
    the source pools it does not say; unbiased is our choice.
    """
    spread = sum(group.squares - group.total.square() / group.number for group in (one, other))
    return (mean_norm(one) - mean_norm(other)) / (spread / (one.number + other.number - 2)).sqrt()
