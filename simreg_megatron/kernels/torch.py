# SPDX-License-Identifier: Apache-2.0
"""SimReg in plain torch, for any device and floating type, in memory O(n): impl "tiled".

The pairs of a chunk are a square matrix, computed tile by tile: a tile above the diagonal also serves its mirror image.
Half precision is widened to float32, one side of a tile at a time. With c = tau ln 2 and f_i = e_i / (|e_i| sqrt(c)),

    P_ij = 2^(<f_i, f_j> - 1 / c),    g_i = sum_j H_ij f_j,    dL/de_i = c (g_i - c <g_i, f_i> f_i) / (|e_i| sqrt(c)),

since exp2 is several times faster on a CPU than exp. The backward takes the P that the forward kept, or computes it
again. It adds up the gradient of as many anchors at a time as there is room for, a region: a tile inside a region
serves both of its sides, and one that reaches outside only the anchors. Masks are numbers, and labels are compared as
floating-point ones: on a CPU arithmetic is several times faster than a selection.

Shapes: b sequences of c chunks of k tokens with d features; p anchors of each chunk; m chunks worked on together; tiles
of r rows and s columns.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from simreg_megatron.kernels.contrast import ForwardResult, Kernels, Rectangles, Saved, Span, Tokens, cut
from simreg_megatron.kernels.precision import full_float32


class Limits(NamedTuple):
    """Memory limits of one kind of device, in bytes beyond the rows, their gradient and a few numbers per token."""

    side: int  # of a tile: on a CPU near its cache, on a GPU so large that it fills the device
    saved: int  # of P, from the forward to the backward
    work: int  # bytes of tiles and of a gradient in its summing type, while one of the two runs


LIMITS = {"cpu": Limits(512, saved=16 << 20, work=12 << 20), "cuda": Limits(2048, saved=48 << 20, work=176 << 20)}
"""A CPU is faster in memory that it has touched before. On a GPU all of it is 256 MiB, 32 for the numbers a token."""
_PAIR_MATRICES = 3

Slab = tuple[slice, slice]  # of sequences and of chunks; one of the two has length 1, or all chunks are in it
Step = tuple[Span, Sequence[Span]]  # rows of tiles, and the columns of each


class Plan(NamedTuple):
    side: int  # of a tile, at most
    region: int  # anchors whose gradient is added up at a time
    chunks_at_once: int
    num_saved: int  # numbers P that stay for the backward: those of all tiles, or none


class Tile(NamedTuple):
    rows: Span
    columns: Span
    left: Tensor  # f of the rows [m, r, d]
    right: Tensor  # f of the columns [m, s, d]
    pairs: Tensor | None  # place of its P [m, r, s]


def plan_for(rows: Tensor, anchors: Span, *, by_document: bool) -> Plan:
    """Choose the largest tiles that fit, then the largest region, then as many chunks at once as fit."""
    (num_sequences, num_chunks, length, width), num_anchors = rows.shape, anchors[1] - anchors[0]
    limits, sum_bytes, row_bytes = _limits(rows), _sum_dtype(rows).itemsize, rows.itemsize

    # Where no copy is needed to merge sequences with their chunks, the returned gradient itself is summed in.
    grad_bytes = 0 if row_bytes == sum_bytes and 1 in (num_sequences, num_chunks) else width * sum_bytes  # of an anchor

    def tile_bytes(side: int) -> int:
        per_token = width * ((3 if length > side else 2) * sum_bytes + row_bytes * (row_bytes < sum_bytes))
        return side * (side * (_PAIR_MATRICES * sum_bytes + by_document) + per_token)

    side = max(1, min(limits.side, length))
    while side > 16 and tile_bytes(side) + side * grad_bytes > limits.work:
        side = -(-side // 2)
    pairs = num_sequences * num_chunks * count_pairs(triangle(anchors, length, side))
    keeps = pairs * sum_bytes <= limits.saved and tile_bytes(side) + num_anchors * grad_bytes <= limits.work
    free_bytes = limits.work + (0 if keeps else limits.saved) - tile_bytes(side)
    most = free_bytes // grad_bytes if grad_bytes else num_anchors
    region = max(1, num_anchors if most >= num_anchors else max(1, most // side) * side)
    chunks_at_once = limits.work // (tile_bytes(side) + region * grad_bytes)
    return Plan(side, region, max(1, min(num_sequences * num_chunks, chunks_at_once)), pairs if keeps else 0)


@functools.lru_cache(maxsize=256)
def triangle(anchors: Span, length: int, side: int) -> list[Step]:
    """Cut into tiles all pairs of anchors, on and above the diagonal, and those of anchors with all other tokens."""
    own = cut(anchors, side)
    others = [*cut((0, anchors[0]), side), *cut((anchors[1], length), side)]
    return [(one, [*own[number:], *others]) for number, one in enumerate(own)]


def count_pairs(steps: Sequence[Step]) -> int:
    return sum((one[1] - one[0]) * (other[1] - other[0]) for one, others in steps for other in others)


class _Chunks:
    """The chunks of one slab, and room for one of their tiles: each is written over the one before."""

    def __init__(self, rows: Tensor, saved: Saved, per_token: Sequence[Tensor], c: float, slab: Slab, room: Tensor):
        self.slab, self.rows, self.c, self._room = slab, rows[slab], c, room  # merged tile by tile: no copy of all rows
        num_chunks, first = rows.shape[0] * rows.shape[1], slab[0].start * rows.shape[1] + slab[1].start
        self.chunk_slice = own = slice(first, first + self.rows.shape[0] * self.rows.shape[1])  # among all chunks
        self.ids, self.scale, self._bias, self._masked = (part.flatten(0, 1)[own] for part in per_token)
        self.documents = None if saved.documents is None else saved.documents.flatten(0, 1)[own]
        self.pairs = saved.pairs.view(num_chunks, -1)[own].view(-1) if saved.pairs.numel() else None

    def tiles(self, steps: Sequence[Step]) -> Iterator[Tile]:
        place, position = None, 0
        for one, others in steps:
            left = self.factor(one)
            for other in others:
                if self.pairs is not None:
                    shape = len(self.ids), one[1] - one[0], other[1] - other[0]
                    place = self.pairs[position : position + math.prod(shape)].view(shape)
                    position += place.numel()
                yield Tile(one, other, left, left if other == one else self.factor(other), place)

    def factor(self, span: Span) -> Tensor:
        """Compute f of some tokens [m, r, d]; 0 where not usable, also for a row of NaN."""
        rows, scale = self.rows[:, :, slice(*span)], self.scale[:, slice(*span), None]
        rows = torch.where(self._masked[:, slice(*span)].view(*rows.shape[:3], 1), 0.0, rows).flatten(0, 1)
        return rows.mul_(scale) if rows.dtype == scale.dtype else rows * scale  # which widens

    def sums(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """Sum P over positives and negatives, j != i: for the tile's rows [2, m, r] and its columns [2, m, s]."""
        both = self._matrices(tile, 0, 2)
        exponentials = self._exponentials(tile, both[0] if tile.pairs is None else tile.pairs)
        negative = self._differs(tile, both[1]).mul_(exponentials)
        torch.sub(exponentials, negative, out=both[0])  # exact: one of the two is 0
        of_rows = both.sum(dim=-1)
        return of_rows, of_rows if tile.rows == tile.columns else both.sum(dim=-2)

    def weights(self, tile: Tile, coeffs: Tensor) -> Tensor:
        """Compute H_ij [m, r, s] from (a, -b) of all tokens [2, m, k]."""
        both, buffer = self._matrices(tile, 1, 2), self._matrices(tile, 0, 1)[0]
        torch.add(coeffs[:, :, slice(*tile.rows), None], coeffs[:, :, None, slice(*tile.columns)], out=both)
        factors = torch.lerp(both[1], both[0], self._differs(tile, buffer), out=both[0])  # exact at 0 and at 1
        return factors.mul_(self._exponentials(tile, buffer) if tile.pairs is None else tile.pairs)

    def _exponentials(self, tile: Tile, into: Tensor) -> Tensor:
        """Compute P_ij [m, r, s]; 0 for pairs that do not meet and for a token with itself.

        Rows that are not usable count in a tile on the diagonal, whose columns are not summed.
        """
        into.copy_(self._bias[:, None, slice(*tile.columns)]).baddbmm_(tile.left, tile.right.mT)
        if tile.rows != tile.columns:
            into.add_(self._bias[:, slice(*tile.rows), None] + 1.0 / self.c)
        # What would be subnormal is 0: it adds nothing to sums of at least 1, and a CPU computes it very slowly.
        least = math.log2(torch.finfo(into.dtype).tiny) + 8
        torch.threshold_(into, least, -math.inf).exp2_()
        if tile.rows == tile.columns:
            into.diagonal(dim1=-2, dim2=-1).zero_()
        if (documents := self.documents) is not None:
            into.masked_fill_(documents[:, slice(*tile.rows), None] != documents[:, None, slice(*tile.columns)], 0.0)
        return into

    def _differs(self, tile: Tile, into: Tensor) -> Tensor:
        """Write 1 where labels differ and 0 where they are equal, [m, r, s]."""
        return torch.ne(self.ids[:, slice(*tile.rows), None], self.ids[:, None, slice(*tile.columns)], out=into)

    def _matrices(self, tile: Tile, first: int, count: int) -> Tensor:
        shape = len(self.ids), tile.left.shape[1], tile.right.shape[1]
        return self._room[first : first + count, : math.prod(shape)].view(count, *shape)


def _add_up_gradient(chunks: _Chunks, steps: Sequence[Step], coeffs: Tensor, region: Span, grad: Tensor) -> None:
    """Write the gradient of the anchors in a region into `grad` [b, c, p, d]."""
    is_in_place = grad.dtype == chunks.scale.dtype and (grad.is_contiguous() or 1 in grad.shape[:2])
    shape = len(chunks.ids), *grad.shape[2:]
    of_factor = grad.flatten(0, 1) if is_in_place else grad.new_empty(shape, dtype=chunks.scale.dtype)
    is_one_tile = len(steps) == len(steps[0][1]) == 1
    if not is_one_tile:
        of_factor.zero_()

    def at(span: Span) -> Tensor:
        return of_factor[:, span[0] - region[0] : span[1] - region[0]]

    for tile in chunks.tiles(steps):
        weights = chunks.weights(tile, coeffs)
        at(tile.rows).baddbmm_(weights, tile.right, beta=0 if is_one_tile else 1)
        if tile.rows != tile.columns and region[0] <= tile.columns[0] < region[1]:
            at(tile.columns).baddbmm_(weights.mT, tile.left)
    left = tile.left
    del tile  # and its memory
    for one, _ in steps:  # from g to the gradient; 0 for rows that are not usable
        grad_rows, factor = at(one), left if is_one_tile else chunks.factor(one)
        radial = (grad_rows * factor).sum(dim=-1, keepdim=True)
        grad_rows.addcmul_(radial, factor, value=-chunks.c).mul_(chunks.scale[:, slice(*one), None] * chunks.c)
    if not is_in_place:
        grad.copy_(of_factor.view_as(grad))


class TorchKernels(Kernels):
    def pair_sums(
        self, tokens: Tokens, anchors: Span, temperature: float, rectangles: Rectangles = None, *, save: bool = False
    ) -> tuple[Saved, Tensor]:
        rows, saved, length = tokens.rows, _prepared(tokens, temperature), tokens.rows.shape[2]
        plan = plan_for(rows, anchors, by_document=saved.documents is not None)
        saved = saved._replace(pairs=saved.scale.new_empty(plan.num_saved if save else 0))
        if rectangles is None:
            steps, mirrored, selected = triangle(anchors, length, plan.side), anchors, slice(*anchors)
        else:
            own, mirrored, selected = cut(anchors, plan.side), (0, length), slice(None)
            steps = [(one, own[number:]) for number, one in enumerate(own)]
            steps += [(one, cut(other, plan.side)) for rows, other in rectangles for one in cut(rows, plan.side)]
        # Pairs off the diagonal count for their columns, too, where these are mirrored.
        sums = torch.zeros(2, *saved.label_ids.shape, dtype=torch.float64, device=rows.device)
        with full_float32():
            for chunks in _slabs(rows, saved, temperature, plan):
                of_slab = sums.flatten(1, 2)[:, chunks.chunk_slice]
                for tile in chunks.tiles(steps):
                    of_rows, of_columns = chunks.sums(tile)
                    of_slab[:, :, slice(*tile.rows)].add_(of_rows)
                    if tile.rows != tile.columns and mirrored[0] <= tile.columns[0] < mirrored[1]:
                        of_slab[:, :, slice(*tile.columns)].add_(of_columns)
        return saved, sums[..., selected]

    def finish(self, saved: Saved, sums: Tensor, anchors: Span, temperature: float) -> ForwardResult:
        label_ids, scale = saved.label_ids[..., slice(*anchors)], saved.scale[..., slice(*anchors)]
        total, negative = (sums[0] + 1.0).to(scale.dtype), sums[1].to(scale.dtype)  # the token itself is a positive
        # NaN for a row that is not finite, whose scale is NaN or 0: without pairs it would pass as a 0.
        ratio = (negative / total).addcdiv_(scale, scale, value=0.0).masked_fill_(label_ids < 0, 0.0)
        slope = total * temperature
        a = slope.addcmul_(slope, ratio).reciprocal_().masked_fill_(ratio == 0, 0.0)
        return ForwardResult(ratio.log1p(), torch.stack([a, a * ratio]), saved)

    def backward(
        self, rows: Tensor, saved: Saved, coeffs: Tensor, anchors: Span, temperature: float, grad: Tensor
    ) -> None:
        plan = plan_for(rows, anchors, by_document=saved.documents is not None)
        signed = torch.stack([coeffs[0], -coeffs[1]]).flatten(1, 2)
        with full_float32():
            for chunks in _slabs(rows, saved, temperature, plan):
                for region in cut(anchors, plan.region):
                    steps = triangle(region, rows.shape[2], plan.side)
                    into = grad[chunks.slab][:, :, region[0] - anchors[0] : region[1] - anchors[0]]
                    _add_up_gradient(chunks, steps, signed[:, chunks.chunk_slice], region, into)

    def saves_pairs(self, rows: Tensor, num_pairs: int, chunk: int) -> bool:
        return num_pairs * _sum_dtype(rows).itemsize <= _limits(rows).saved


def _prepared(tokens: Tokens, temperature: float) -> Saved:
    """Compute scale, NaN or 0 for a row that is not finite, and label ids of the tokens; zero rows are not usable.

    The scale is rounded once: at tau 0.01 each error of a norm is a hundred times as large in the exponent.
    """
    rows = tokens.rows
    norms = torch.empty(tokens.labels.shape, dtype=torch.float64, device=rows.device)
    step = max(1, _limits(rows).work // max(1, 32 * rows.shape[0] * rows.shape[1] * rows.shape[3]))
    for first, last in cut((0, rows.shape[2]), step):
        part = rows[:, :, first:last]
        # Squares of float32 neither overflow nor vanish in float64.
        norms[:, :, first:last] = torch.linalg.vector_norm(part, dim=-1, dtype=torch.float64)
    usable = torch.logical_and(tokens.usable, norms)  # a NaN counts, as any number but 0
    scale = norms.mul_(math.sqrt(temperature * math.log(2))).reciprocal_().to(_sum_dtype(rows))
    label_ids = label_ids_of(tokens.labels, usable)
    return Saved(tokens.documents, label_ids, scale.masked_fill_(~usable, 0.0), scale.new_empty(0))


def label_ids_of(labels: Tensor, usable: Tensor) -> Tensor:
    """Replace labels [..., k] by small numbers, equal where labels are, exact in float32; -1 for tokens not usable."""
    signed = labels if labels.dtype.is_signed else labels.long()  # bytes of a text would make 255 of -1
    usable_labels = torch.where(usable, signed, -1).contiguous()
    ranks = torch.searchsorted(usable_labels.sort(dim=-1).values, usable_labels)
    return ranks.float().masked_fill_(~usable, -1.0)


def _slabs(rows: Tensor, saved: Saved, temperature: float, plan: Plan) -> Iterator[_Chunks]:
    """Yield the chunks that are worked on together: several sequences, or several chunks of one."""
    masked, c = saved.label_ids < 0, temperature * math.log(2)
    bias = torch.full_like(saved.scale, -1.0 / c).masked_fill_(masked, -math.inf)
    room = saved.scale.new_empty(_PAIR_MATRICES, plan.chunks_at_once * plan.side**2)
    num_sequences, num_chunks = rows.shape[:2]
    sequences, chunks = max(1, plan.chunks_at_once // max(1, num_chunks)), min(plan.chunks_at_once, max(1, num_chunks))
    for sequence in range(0, num_sequences, sequences):
        for chunk in range(0, num_chunks, chunks):
            slab = slice(sequence, sequence + sequences), slice(chunk, chunk + chunks)
            yield _Chunks(rows, saved, (saved.label_ids, saved.scale, bias, masked), c, slab, room)


def _sum_dtype(rows: Tensor) -> torch.dtype:
    return torch.promote_types(rows.dtype, torch.float32)


def _limits(rows: Tensor) -> Limits:
    return LIMITS.get(rows.device.type, LIMITS["cuda"])
