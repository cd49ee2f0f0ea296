# SPDX-License-Identifier: Apache-2.0
"""The sums and the gradient of `contrast` by tiles, in plain torch: every pair computed once, no k x k matrix.

Masks are numbers, not bools: on a CPU arithmetic is five times faster than a selection.

Shapes: b sequences of c chunks of k tokens with d features; p anchors of each chunk; m chunks worked on together;
tiles of r rows and s columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

Span = tuple[int, int]
Slab = tuple[slice, slice]  # of sequences and of chunks; one of the two has length 1, or all chunks are in it

TILE = {"cpu": 512, "cuda": 2048}
"""Longest side of a tile. On a CPU a tile should lie near its cache; on a GPU it should fill the device."""
WORKSPACE = {"cpu": 32 << 20, "cuda": 192 << 20}
"""Bytes that the tiles of one step may take: as many chunks go together as fit, but at least one."""
_PAIR_MATRICES = 4  # pairs x coefficients, label masks, exponentials, and one for documents
_ROW_COPIES = 3  # unit rows of both sides of a tile, and what one product returns


@torch.library.custom_op("simreg_megatron::anchor_sums", mutates_args=())
def anchor_sums(
    rows: Tensor, names: Tensor, scale: Tensor, documents: Tensor | None, first: int, last: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """(S_pos, S_neg / S_pos) of the anchors first:last, both [b, c, last - first].

    One operator, so that torch.compile keeps it whole and does not unroll its tiles.
    """
    anchors = first, last
    sums = torch.zeros(2, *names.shape, dtype=torch.float64, device=rows.device)  # many tiles are added up
    sums[0] = 1.0  # the token itself
    for slab in _slabs(rows):
        pairs = _Pairs(rows, names, scale, documents, slab, temperature)
        positive_sums, negative_sums = (part[slab].flatten(0, 1) for part in sums)
        for one, others in _panels(anchors, rows):
            pairs.hold(one)
            for other in others:
                positive, negative = pairs.positive_and_negative(other)
                positive_sums[:, slice(*one)] += positive.sum(dim=-1)
                negative_sums[:, slice(*one)] += negative.sum(dim=-1)
                if one != other and anchors[0] <= other[0] < anchors[1]:
                    positive_sums[:, slice(*other)] += positive.sum(dim=-2)
                    negative_sums[:, slice(*other)] += negative.sum(dim=-2)
        sums[0][slab], sums[1][slab] = (part.view_as(sums[0][slab]) for part in (positive_sums, negative_sums))
    own = sums[..., first:last].to(scale.dtype)
    doubt = scale[..., first:last] * 0.0  # NaN for a row that is not finite: one that meets nobody would pass as a 0
    return own[0].clone(), torch.where(names[..., first:last] >= 0, own[1] / own[0] + doubt, 0.0)


@anchor_sums.register_fake
def _(
    rows: Tensor, names: Tensor, scale: Tensor, documents: Tensor | None, first: int, last: int, temperature: float
) -> tuple[Tensor, Tensor]:
    shape = *scale.shape[:2], last - first
    return scale.new_empty(shape), scale.new_empty(shape)


@torch.library.custom_op("simreg_megatron::pair_gradient", mutates_args=())
def pair_gradient(
    rows: Tensor,
    names: Tensor,
    scale: Tensor,
    documents: Tensor | None,
    pull: Tensor,
    first: int,
    last: int,
    reach_first: int,
    reach_last: int,
    temperature: float,
) -> Tensor:
    """Gradient of the rows reach_first:reach_last, [b, c, reach, d] in their type, from pairs that hold an anchor.

    Args:
        rows, names, scale, documents, temperature: as in `anchor_sums`.
        pull: (a, b) of all tokens, [2, b, c, k]; tokens that are anchors on other ranks have theirs, too.
        first, last: the anchors of this call, inside the reach.
        reach_first, reach_last: all rows, or the anchors alone, whose gradient is then complete if all tokens that
            they meet have their pull.
    """
    reach = reach_first, reach_last
    grad = torch.zeros_like(rows[:, :, slice(*reach)])
    for slab in _slabs(rows):
        pairs = _Pairs(rows, names, scale, documents, slab, temperature)
        of_unit = pairs.accumulator(grad[slab])
        a, b = (part[slab].flatten(0, 1) for part in pull)
        for one, others in _panels((first, last), rows):
            pairs.hold(one)
            for other in others:
                weights = pairs.weights(a, b, other)
                pairs.add_product(of_unit, weights, one, other, reach)
                if one != other and reach[0] <= other[0] < reach[1]:
                    pairs.add_product(of_unit, weights.mT, other, one, reach)
        pairs.finish(grad[slab], of_unit, reach)
    return grad


@pair_gradient.register_fake
def _(
    rows: Tensor,
    names: Tensor,
    scale: Tensor,
    documents: Tensor | None,
    pull: Tensor,
    first: int,
    last: int,
    reach_first: int,
    reach_last: int,
    temperature: float,
) -> Tensor:
    return torch.empty_like(rows[:, :, reach_first:reach_last])


class _Pairs:
    """The pairs of the chunks in one slab, tile by tile; every tile is written over the one before."""

    def __init__(
        self,
        rows: Tensor,
        names: Tensor,
        scale: Tensor,
        documents: Tensor | None,
        slab: Slab,
        temperature: float,
    ) -> None:
        self._rows = rows[slab]  # [b, c, k, d]: chunks are merged tile by tile, which costs no copy of all of them
        self._names, self._scale = names[slab].flatten(0, 1), scale[slab].flatten(0, 1)
        self._documents = None if documents is None else documents[slab].flatten(0, 1)
        self._shift = torch.where(self._names >= 0, 0.0, -math.inf).to(scale.dtype)
        self._temperature = temperature
        self._keeps_halves = rows.is_cuda and rows.dtype.itemsize == 2 and _BMM_WIDENS
        side = min(_limit(TILE, rows), rows.shape[2])
        self._buffers = scale.new_empty(3, self._names.shape[0] * side * side)

    def hold(self, one: Span) -> None:
        """Choose the rows of the next tiles."""
        self._one = one
        self._left = self._factor(one)

    def positive_and_negative(self, other: Span) -> tuple[Tensor, Tensor]:
        """P_ij [m, r, s] over the pairs of equal labels, without a token and itself, and over the others; else 0."""
        exponentials, differs = self._exponentials(other)
        negative = differs.mul_(exponentials)
        return exponentials.sub_(negative), negative  # exact: one of the two is 0

    def weights(self, a: Tensor, b: Tensor, other: Span) -> Tensor:
        """H_ij [m, r, s]."""
        exponentials, differs = self._exponentials(other)
        one, two = slice(*self._one), slice(*other)
        found = torch.add(a[:, one, None], a[:, None, two], out=self._buffer(2, other)).mul_(differs)
        same = differs.sub_(1.0)  # -1 where labels are equal
        found.addcmul_(same, b[:, one, None]).addcmul_(same, b[:, None, two])
        return found.mul_(exponentials)

    def accumulator(self, grad: Tensor) -> Tensor:
        """Zeros [m, k, d] for H e^: the memory of `grad` [b, c, k, d] itself where its type and strides allow it."""
        if grad.dtype == self._scale.dtype and 1 in grad.shape[:2]:
            return grad.flatten(0, 1)
        return self._scale.new_zeros(grad.shape[0] * grad.shape[1], *grad.shape[2:])

    def add_product(self, to: Tensor, weights: Tensor, at: Span, factor: Span, reach: Span) -> None:
        """Add `weights` times the unit rows of `factor` to the rows `at`, which `to` counts from reach[0]."""
        right = self._right if factor != self._one else self._left
        target = to[:, at[0] - reach[0] : at[1] - reach[0]]
        if not self._keeps_halves:
            target.baddbmm_(weights, right)
            return
        weights = weights * self._scale[:, None, slice(*factor)]
        # In bfloat16, for float16 would lose the small ones.
        target += _widening_bmm(weights.bfloat16(), right.bfloat16())

    def finish(self, grad: Tensor, of_unit: Tensor, reach: Span) -> None:
        """From the gradient of the unit rows to that of the rows [b, c, reach, d]; 0 for those that are not usable."""
        step = max(1, _limit(WORKSPACE, grad) // max(1, 16 * of_unit.shape[0] * of_unit.shape[2]))
        for span in _cut((0, of_unit.shape[1]), step):
            there = reach[0] + span[0], reach[0] + span[1]
            unit, part = self._unit(there), of_unit[:, slice(*span)]
            radial = (part * unit).sum(dim=-1, keepdim=True)
            found = (part - radial * unit) * self._scale[:, slice(*there), None]
            found = torch.where(self._names[:, slice(*there), None] >= 0, found, 0.0)
            grad[:, :, slice(*span)] = found.view_as(grad[:, :, slice(*span)])

    def _exponentials(self, other: Span) -> tuple[Tensor, Tensor]:
        """P_ij [m, r, s], 0 for pairs that do not meet and for a token with itself; and 0 or 1: labels differ."""
        one, two = slice(*self._one), slice(*other)
        logits = self._cosines(other)  # minus 1 before the division: exact where it matters
        logits.add_(self._shift[:, one, None] - 1.0).mul_(1.0 / self._temperature).add_(self._shift[:, None, two])
        if self._documents is not None:
            logits.masked_fill_(self._documents[:, one, None] != self._documents[:, None, two], -math.inf)
        if self._one == other:
            logits.diagonal(dim1=-2, dim2=-1).fill_(-math.inf)
        # What would be subnormal is 0: it adds nothing to sums of at least 1, and a CPU computes it very slowly.
        least = math.log(torch.finfo(logits.dtype).tiny) + 8
        exponentials = torch.threshold_(logits, least, -math.inf).exp_()
        differs = torch.sub(self._names[:, one, None], self._names[:, None, two], out=self._buffer(1, other))
        return exponentials, differs.abs_().clamp_(max=1.0)

    def _cosines(self, other: Span) -> Tensor:
        """[m, r, s]"""
        self._right = self._left if other == self._one else self._factor(other)
        found = self._buffer(0, other)
        if not self._keeps_halves:
            return torch.bmm(self._left, self._right.mT, out=found)
        found = _widening_bmm(self._left, self._right.mT)
        found.mul_(self._scale[:, slice(*self._one), None])
        return found.mul_(self._scale[:, None, slice(*other)])

    def _factor(self, span: Span) -> Tensor:
        """What enters the products: unit rows, or half precision as it is, to be scaled afterwards."""
        return self._used(span) if self._keeps_halves else self._unit(span)

    def _unit(self, span: Span) -> Tensor:
        """e / |e| [m, r, d]."""
        used = self._used(span)
        wide = used.to(self._scale.dtype)  # a new tensor or one that `_used` made
        return wide.mul_(self._scale[:, slice(*span), None])

    def _used(self, span: Span) -> Tensor:
        """A copy [m, r, d] of the rows, 0 where not usable: by the bits, for a NaN times 0 would still be a NaN."""
        rows = self._rows[:, :, slice(*span)]
        integer = _INTEGERS[rows.dtype.itemsize]
        bits = torch.where(self._names[:, slice(*span)] >= 0, -1, 0).to(integer)
        masked = rows.view(integer) & bits.view(*rows.shape[:3], 1)
        return masked.view(rows.dtype).flatten(0, 1)

    def _buffer(self, number: int, other: Span) -> Tensor:
        rows, columns = self._one[1] - self._one[0], other[1] - other[0]
        shape = self._names.shape[0], rows, columns
        return self._buffers[number, : math.prod(shape)].view(shape)


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_BMM_WIDENS = "dtype" in torch.ops.aten.bmm.overloads()  # torch 2.8 and newer


def _widening_bmm(left: Tensor, right: Tensor) -> Tensor:
    """Half precision in, float32 out: products are never rounded to half precision."""
    return torch.bmm(left, right, out_dtype=torch.float32)


def _slabs(rows: Tensor) -> Iterator[Slab]:
    """Chunks that are worked on together: several sequences, or several chunks of one."""
    num_sequences, num_chunks, length, width = rows.shape
    side = min(_limit(TILE, rows), length)
    numbers = side * (side * _PAIR_MATRICES + width * _ROW_COPIES)
    count = max(1, _limit(WORKSPACE, rows) // max(1, 4 * numbers))
    together = max(1, count // max(1, num_chunks))
    count = min(count, max(1, num_chunks))
    for sequence in range(0, num_sequences, together):
        for chunk in range(0, num_chunks, count):
            yield slice(sequence, sequence + together), slice(chunk, chunk + count)


def _panels(anchors: Span, rows: Tensor) -> Iterator[tuple[Span, list[Span]]]:
    """Each span of anchors with those it meets: anchors in the upper triangle, then all other tokens."""
    size = _limit(TILE, rows)
    own = list(_cut(anchors, size))
    others = [*_cut((0, anchors[0]), size), *_cut((anchors[1], rows.shape[2]), size)]
    for number, one in enumerate(own):
        yield one, [*own[number:], *others]


def _cut(span: Span, size: int) -> Iterator[Span]:
    for first in range(span[0], span[1], size):
        yield first, min(first + size, span[1])


def _limit(limits: dict[str, int], rows: Tensor) -> int:
    return limits.get(rows.device.type, limits["cuda"])
