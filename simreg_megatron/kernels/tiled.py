# SPDX-License-Identifier: Apache-2.0
"""Tiles in plain torch, on any device.

Masks are numbers, not bools: on a CPU arithmetic is five times faster than a selection.

Shapes: m chunks worked on together, of k tokens with d features; tiles of r rows and s columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from simreg_megatron.kernels import halves
from simreg_megatron.kernels.form import Span, cut
from simreg_megatron.kernels.walk import Given, Slab, Tiles, add_form, sum_dtype

TILE = {"cpu": 512, "cuda": 2048}
"""Longest side of a tile. On a CPU a tile should lie near its cache; on a GPU it should fill the device."""
_SHORTER = 256  # step between the sides that are tried where the longest does not fit
_PAIR_MATRICES = 3  # exponentials, label masks, and weights
_PROJECTED = 12  # bytes of a feature while it is projected, at most


class TorchTiles(Tiles):
    """Each tile is a matrix of pairs in the type that sums are taken in."""

    def __init__(self, given: Given, slab: Slab, temperature: float, side: int) -> None:
        super().__init__(given, slab, temperature, side)
        usable = self.names >= 0
        self._shift = usable.to(self.scale.dtype).log_()  # 0 or -inf
        self._bits = usable.to(_INTEGERS[self.rows.dtype.itemsize]).neg_()  # all of them or none
        self._halves = halves.multiplies_halves(self.rows)
        self._per_weight = halves.numbers_per_weight(*self.rows.shape[2:], self.documents is not None)  # type: ignore[call-arg]
        self._room = self.names.shape[0] * self.bytes_per_chunk(given, self.side)
        self._release()

    def _release(self) -> None:
        """Give back what tiles need."""
        self._left = self._right = self.scale.new_empty(0)
        self._buffers: dict[int, Tensor] = {}

    @classmethod
    def sides(cls, rows: Tensor) -> Sequence[int]:
        return range(TILE.get(rows.device.type, TILE["cuda"]), 0, -_SHORTER)

    @staticmethod
    def bytes_per_chunk(given: Given, side: int) -> int:
        length, width = given.rows.shape[2:]
        wide, own = given.scale.dtype.itemsize, given.rows.dtype.itemsize
        of_pair = wide * _PAIR_MATRICES + (given.documents is not None)
        if not halves.multiplies_halves(given.rows):
            of_feature = wide + (0 if own == wide else own / 2)  # what is widened is one side at a time
        else:
            of_feature = own if given.rows.dtype == torch.bfloat16 else 4 * own
        return int(side * (side * of_pair + (2 if length > side else 1) * width * of_feature))

    @staticmethod
    def kept_dtype(rows: Tensor, length: int, by_document: bool) -> torch.dtype | None:
        if halves.multiplies_halves(rows):
            return halves.kept_dtype(length, rows.shape[-1], by_document)
        return sum_dtype(rows)

    def hold(self, one: Span) -> None:
        self.one = one
        self._left = self._factor(one)

    def sums(self, other: Span, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        self._right = self._left if other == self.one else self._factor(other)
        exponentials = self._exponentials(other)
        if keep is not None:
            keep.view_as(exponentials).copy_(exponentials)
        negative = self._differs(other).mul_(exponentials)
        positive = exponentials.sub_(negative)  # exact: one of the two is 0
        of_rows = torch.stack([positive.sum(dim=-1), negative.sum(dim=-1)])
        if other == self.one:
            return of_rows, of_rows  # H is symmetric, and the caller uses one of them
        return of_rows, torch.stack([positive.sum(dim=-2), negative.sum(dim=-2)])

    def add_gradient(
        self, other: Span, pull: Tensor, kept: Tensor | None, to_one: Tensor, to_other: Tensor | None, fresh: bool
    ) -> None:
        self._right = self._left if other == self.one else self._factor(other)
        weights = self._weights(
            other, pull, self._exponentials(other) if kept is None else kept.view(self._shape(other))
        )
        if not self._halves:
            to_one.baddbmm_(weights, self._right, beta=0 if fresh else 1)
            if to_other is not None:
                to_other.baddbmm_(weights.mT, self._left)
            return
        weights.mul_(self.scale[:, slice(*self.one), None]).mul_(self.scale[:, None, slice(*other)])
        parts = self._halves_buffer(1, other)
        halves.split(weights, parts)
        halves.add_products(to_one, parts, halves.factors(self._right, self._per_weight), fresh=fresh)
        if to_other is not None:
            halves.add_products(to_other, parts.mT, halves.factors(self._left, self._per_weight))

    def project(self, of_unit: Tensor, span: Span, grad: Tensor | None) -> None:
        held = self._left if span == self.one and not self._halves else None  # in short chunks: they are here already
        self._release()
        step = max(1, self._room // max(1, _PROJECTED * of_unit.shape[0] * of_unit.shape[2]))
        for first, last in cut((0, of_unit.shape[1]), step):
            there = span[0] + first, span[0] + last
            scale, part = self.scale[:, slice(*there), None], of_unit[:, first:last]
            if self._halves:  # by the rows themselves: each side of a pair has its scale already
                rows = self._used(there)
                radial = (part * rows).sum(dim=-1, keepdim=True).mul_(scale).mul_(scale)
                part.addcmul_(radial, rows, value=-1)
            else:
                unit = self._unit(there) if held is None else held[:, first:last]
                radial = (part * unit).sum(dim=-1, keepdim=True)
                part.addcmul_(radial, unit, value=-1).mul_(scale)
            part.masked_fill_(self.names[:, slice(*there), None] < 0, 0.0)
            if grad is not None:
                into = grad[:, :, first:last]
                into.copy_(part.view_as(into))

    def _exponentials(self, other: Span) -> Tensor:
        """P_ij [m, r, s], 0 for pairs that do not meet and for a token with itself."""
        one, two = slice(*self.one), slice(*other)
        logits = self._cosines(other)  # minus 1 before the division: exact where it matters
        logits.add_(self._shift[:, one, None] - 1.0).mul_(1.0 / self.temperature).add_(self._shift[:, None, two])
        if self.documents is not None:
            logits.masked_fill_(self.documents[:, one, None] != self.documents[:, None, two], -math.inf)
        if self.one == other:
            logits.diagonal(dim1=-2, dim2=-1).fill_(-math.inf)
        # What would be subnormal is 0: it adds nothing to sums of at least 1, and a CPU computes it very slowly.
        least = math.log(torch.finfo(logits.dtype).tiny) + 8
        return torch.threshold_(logits, least, -math.inf).exp_()

    def _differs(self, other: Span) -> Tensor:
        """1 where labels differ, 0 where they are equal, [m, r, s]."""
        one, two = slice(*self.one), slice(*other)
        differs = torch.sub(self.names[:, one, None], self.names[:, None, two], out=self._buffer(1, other))
        return differs.abs_().clamp_(max=1.0)

    def _weights(self, other: Span, pull: Tensor, exponentials: Tensor) -> Tensor:
        """H_ij [m, r, s]."""
        a, b = pull
        one, two = slice(*self.one), slice(*other)
        differs = self._differs(other)
        found = torch.add(a[:, one, None], a[:, None, two], out=self._buffer(2, other)).mul_(differs)
        same = differs.sub_(1.0)  # -1 where labels are equal
        found.addcmul_(same, b[:, one, None]).addcmul_(same, b[:, None, two])
        return found.mul_(exponentials)

    def _cosines(self, other: Span) -> Tensor:
        """[m, r, s]"""
        found = self._buffer(0, other)
        if not self._halves:
            return torch.bmm(self._left, self._right.mT, out=found)
        halves.widening_bmm(self._left, self._right.mT, found)
        found.mul_(self.scale[:, slice(*self.one), None])
        return found.mul_(self.scale[:, None, slice(*other)])

    def _factor(self, span: Span) -> Tensor:
        """What enters the products: unit rows, or half precision as it is, to be scaled afterwards."""
        return self._used(span) if self._halves else self._unit(span)

    def _unit(self, span: Span) -> Tensor:
        """e / |e| [m, r, d]."""
        used = self._used(span)
        wide = used.to(self.scale.dtype)  # a new tensor or one that `_used` made
        return wide.mul_(self.scale[:, slice(*span), None])

    def _used(self, span: Span) -> Tensor:
        """A copy [m, r, d] of the rows, 0 where not usable: by the bits, for a NaN times 0 would still be a NaN."""
        rows, bits = self.rows[:, :, slice(*span)], self._bits[:, slice(*span)]
        masked = rows.view(bits.dtype) & bits.view(*rows.shape[:3], 1)
        return masked.view(rows.dtype).flatten(0, 1)

    def _buffer(self, number: int, other: Span) -> Tensor:
        if number not in self._buffers:
            self._buffers[number] = self.scale.new_empty(self.names.shape[0] * self.side**2)
        shape = self._shape(other)
        return self._buffers[number][: math.prod(shape)].view(shape)

    def _halves_buffer(self, number: int, other: Span) -> Tensor:
        """[1 or 2, m, r, s], in the place of a buffer."""
        shape = self._per_weight, *self._shape(other)
        return self._buffers[number].view(torch.bfloat16)[: math.prod(shape)].view(shape)

    def _shape(self, other: Span) -> tuple[int, int, int]:
        return self.names.shape[0], self.one[1] - self.one[0], other[1] - other[0]


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


add_form("tiled", TorchTiles)
