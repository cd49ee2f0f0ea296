# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Tiles in Triton: products, exponentials, masks and sums of a tile in one kernel, the gradient's product in cuBLAS.

A tile of the walk is a block of thousands of tokens, cut here into tiles of a streaming multiprocessor. Within the
block of a span with itself only pairs above the diagonal are computed. Partial sums are stored one by one and added
in a fixed order: the same bits every time. Features are only ever a loop, so any width goes.

W_ij = H_ij / (|e_i| |e_j|) goes to the product as one or two numbers in bfloat16 (see `halves`), rows as they are:
nothing is normalised in half precision. W is as symmetric as H, so one block serves both of its sides, and with
g = W e the gradient is g_i - <g_i, e^_i> e^_i.

Shapes: m chunks of k tokens with d features, c of them in each sequence; blocks of r rows and s columns; tiles of
SIDE x SIDE pairs, of which a block of H has whole ones (R x S pairs with what fills them up), so that stores need no
mask; products are summed BK features at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from simreg_megatron.kernels import halves
from simreg_megatron.kernels.rows import INTERPRETS, TritonTiles, bytes_of_factor, cdiv, run, weights_of
from simreg_megatron.kernels.walk import Given, Slab, Span, add_form

TILE = {
    2: {"SIDE": 128, "BK": 64, "num_warps": 8, "num_stages": 3},
    4: {"SIDE": 64, "BK": 32, "num_warps": 4, "num_stages": 2},
}
"""Tile of a multiprocessor by bytes of an element: what fits into the registers and shared memory of sm_90."""
LONGEST_BLOCK = 8192
_MIRRORED = 64  # side of the tiles that are copied over the diagonal; it divides every SIDE


@triton.jit
def _column_of(program, guess):
    """Column j of the tiles j (j + 1) / 2 ... on and above a diagonal, from a guess that is off by one at most."""
    guess -= (guess * (guess + 1) // 2 > program).to(tl.int32)
    return guess + ((guess + 1) * (guess + 2) // 2 <= program).to(tl.int32)


@triton.jit
def _tile_of(program, tiles_i, UPPER: tl.constexpr):
    """(row, column) of a tile: neighbours share columns, so what runs at the same time reads the same rows again."""
    if UPPER:  # a GPU's square root is approximate: a unit too low at a square would be another column
        tile_j = _column_of(program, ((tl.sqrt((8 * program + 1).to(tl.float32)) - 1.0) * 0.5).to(tl.int32))
        return program - tile_j * (tile_j + 1) // 2, tile_j
    else:
        return program % tiles_i, program // tiles_i


@triton.jit
def _locate(first, last, tile, SIZE: tl.constexpr):
    """Positions of a tile, those beyond the end, and positions that may be read."""
    at = first + tile * SIZE + tl.arange(0, SIZE)
    return at, tl.minimum(at, last - 1)


@triton.jit
def _exponentials(
    rows, names, scale, documents, chunk, chunks, stride_b, stride_c, stride_k, length, width,
    i, safe_i, j, safe_j, to_exponent,
    HAS_DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr, SIDE: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """P_ij [SIDE, SIDE], 0 for pairs that do not meet and for a token with itself."""
    base = rows + (chunk // chunks).to(tl.int64) * stride_b + (chunk % chunks).to(tl.int64) * stride_c
    features = tl.arange(0, BK)
    left = base + safe_i.to(tl.int64)[:, None] * stride_k + features[None, :]
    right = base + safe_j.to(tl.int64)[None, :] * stride_k + features[:, None]
    products = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    for start in range(0, width, BK):
        if EVEN:
            one, two = tl.load(left), tl.load(right)
        else:
            one = tl.load(left, mask=features[None, :] + start < width, other=0.0)
            two = tl.load(right, mask=features[:, None] + start < width, other=0.0)
        if WIDEN:  # Triton's interpreter multiplies the bits of bfloat16
            one, two = one.to(tl.float32), two.to(tl.float32)
        products = tl.dot(one, two, products, input_precision=PRECISION)
        left += BK
        right += BK
    tokens = chunk.to(tl.int64) * length
    cosines = products * tl.load(scale + tokens + safe_i)[:, None] * tl.load(scale + tokens + safe_j)[None, :]
    exponentials = tl.exp2((cosines - 1.0) * to_exponent)
    name_i, name_j = tl.load(names + tokens + safe_i), tl.load(names + tokens + safe_j)
    meet = (name_i >= 0)[:, None] & (name_j >= 0)[None, :] & (i == safe_i)[:, None] & (j == safe_j)[None, :]
    meet = meet & (i[:, None] != j[None, :])
    if HAS_DOCUMENTS:
        document_i, document_j = tl.load(documents + tokens + safe_i), tl.load(documents + tokens + safe_j)
        meet = meet & (document_i[:, None] == document_j[None, :])
    return tl.where(meet, exponentials, 0.0)


@triton.jit
def _kept_at(kept, chunk, SIDE: tl.constexpr):
    """Where this program's tile of P lies: tiles one after the other."""
    number = chunk.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    side = tl.arange(0, SIDE)
    return kept + number * SIDE * SIDE + side[:, None] * SIDE + side[None, :]


@triton.jit
def _sums_kernel(
    rows, names, scale, documents, chunks, stride_b, stride_c, stride_k, length, width,
    first_i, last_i, first_j, last_j, to_exponent, of_rows, of_columns, keep,
    UPPER: tl.constexpr, KEEP: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr, SIDE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile's sums of P: to of_rows [2, m, tiles of columns, r] and of_columns [2, m, tiles of rows, s].

    UPPER: the block is of a span with itself, and only tiles on and above its diagonal are computed.
    """
    tiles_i, tiles_j, chunk = tl.cdiv(last_i - first_i, SIDE), tl.cdiv(last_j - first_j, SIDE), tl.program_id(1)
    tile_i, tile_j = _tile_of(tl.program_id(0), tiles_i, UPPER)
    i, safe_i = _locate(first_i, last_i, tile_i, SIDE)
    j, safe_j = _locate(first_j, last_j, tile_j, SIDE)
    exponentials = _exponentials(
        rows, names, scale, documents, chunk, chunks, stride_b, stride_c, stride_k, length, width,
        i, safe_i, j, safe_j, to_exponent, HAS_DOCUMENTS, EVEN, PRECISION, WIDEN, SIDE, BK,
    )  # fmt: skip
    height, breadth = last_i - first_i, last_j - first_j
    if KEEP:
        tl.store(_kept_at(keep, chunk, SIDE), exponentials.to(keep.dtype.element_ty))
    tokens = chunk.to(tl.int64) * length
    same = tl.load(names + tokens + safe_i)[:, None] == tl.load(names + tokens + safe_j)[None, :]
    positive = tl.where(same, exponentials, 0.0)
    negative = exponentials - positive  # exact: one of the two is 0
    num_chunks = tl.num_programs(1)
    row_at = (chunk * tiles_j + tile_j).to(tl.int64) * height + (i - first_i)
    tl.store(of_rows + row_at, tl.sum(positive, axis=1), mask=i < last_i)
    row_at += num_chunks.to(tl.int64) * tiles_j * height
    tl.store(of_rows + row_at, tl.sum(negative, axis=1), mask=i < last_i)
    column_at = (chunk * tiles_i + tile_i).to(tl.int64) * breadth + (j - first_j)
    inside = j < last_j
    if UPPER:  # on the diagonal the rows have counted both sides
        inside = inside & (tile_i != tile_j)
    tl.store(of_columns + column_at, tl.sum(positive, axis=0), mask=inside)
    column_at += num_chunks.to(tl.int64) * tiles_i * breadth
    tl.store(of_columns + column_at, tl.sum(negative, axis=0), mask=inside)


@triton.jit
def _weights_kernel(
    rows, names, scale, documents, chunks, stride_b, stride_c, stride_k, length, width,
    first_i, last_i, first_j, last_j, to_exponent, pull_a, pull_b, kept, weights, R, S,
    UPPER: tl.constexpr, IS_KEPT: tl.constexpr, SPLIT: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr, SIDE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of W_ij, to weights [m, R, S]; SPLIT: what their type leaves of it to weights [2, m, R, S], too.

    UPPER: the block is of a span with itself; `_mirror_kernel` fills what lies below its diagonal.
    """
    chunk = tl.program_id(1)
    tile_i, tile_j = _tile_of(tl.program_id(0), tl.cdiv(last_i - first_i, SIDE), UPPER)
    i, safe_i = _locate(first_i, last_i, tile_i, SIDE)
    j, safe_j = _locate(first_j, last_j, tile_j, SIDE)
    if IS_KEPT:
        exponentials = tl.load(_kept_at(kept, chunk, SIDE)).to(tl.float32)
    else:
        exponentials = _exponentials(
            rows, names, scale, documents, chunk, chunks, stride_b, stride_c, stride_k, length, width,
            i, safe_i, j, safe_j, to_exponent, HAS_DOCUMENTS, EVEN, PRECISION, WIDEN, SIDE, BK,
        )  # fmt: skip
    tokens = chunk.to(tl.int64) * length
    at_i, at_j = tokens + safe_i, tokens + safe_j
    same = tl.load(names + at_i)[:, None] == tl.load(names + at_j)[None, :]
    apart = tl.load(pull_a + at_i)[:, None] + tl.load(pull_a + at_j)[None, :]
    together = tl.load(pull_b + at_i)[:, None] + tl.load(pull_b + at_j)[None, :]
    found = tl.where(same, -together, apart) * exponentials
    found *= tl.load(scale + at_i)[:, None] * tl.load(scale + at_j)[None, :]
    tile = found.to(weights.dtype.element_ty)
    side = tl.arange(0, SIDE)
    in_tile = side[:, None] * S + side[None, :]
    block = chunk.to(tl.int64) * R * S
    here = block + (tile_i * SIDE).to(tl.int64) * S + tile_j * SIDE
    tl.store(weights + here + in_tile, tile)
    if SPLIT:
        here += tl.num_programs(1).to(tl.int64) * R * S
        tl.store(weights + here + in_tile, (found - tile.to(tl.float32)).to(weights.dtype.element_ty))


@triton.jit
def _mirror_kernel(weights, S, SIDE: tl.constexpr):
    """One tile above the diagonal of the square weights [m, S, S] to its place below. Apart, as both need registers."""
    tile_i, tile_j = _tile_of(tl.program_id(0), S // SIDE, True)
    chunk = tl.program_id(1)
    side = tl.arange(0, SIDE)
    in_tile = side[:, None] * S + side[None, :]
    block = weights + chunk.to(tl.int64) * S * S
    tile = tl.load(block + (tile_i * SIDE).to(tl.int64) * S + tile_j * SIDE + in_tile)
    if tile_i != tile_j:
        tl.store(block + (tile_j * SIDE).to(tl.int64) * S + tile_i * SIDE + in_tile, tl.trans(tile))


class FusedTiles(TritonTiles):
    """Each tile is a block; its pairs never leave the multiprocessor, but for H on its way to the product."""

    impl = "triton"

    def __init__(self, given: Given, slab: Slab, temperature: float, side: int) -> None:
        super().__init__(given, slab, temperature, side)
        if self.documents is not None:
            self.documents = self.documents.int()  # half the registers

    @classmethod
    def sides(cls, rows: Tensor) -> Sequence[int]:
        cls.check_dtype(rows)
        return range(LONGEST_BLOCK, 0, -_BLOCK_UNIT)

    @staticmethod
    def bytes_per_chunk(given: Given, side: int) -> int:
        element, per_weight = weights_of(given)
        tile = TILE[given.rows.dtype.itemsize]["SIDE"]
        # Weights, and four partial sums for each side of a multiprocessor's tile: float32 for two kinds of pairs.
        filled = cdiv(side, tile) * tile
        of_pairs = filled**2 * per_weight * element.itemsize + 2 * 2 * 4 * side * (filled // tile)
        return of_pairs + (2 if given.rows.shape[2] > side else 1) * side * bytes_of_factor(given)

    @staticmethod
    def kept_numbers(rows: Tensor, one: Span, other: Span) -> int:
        side = TILE[rows.dtype.itemsize]["SIDE"]
        tiles_i, tiles_j = (cdiv(last - first, side) for first, last in (one, other))
        return _num_tiles(tiles_i, None if one == other else tiles_j) * side**2

    def sums(self, other: Span, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        upper = other == self.one
        num_chunks, height, breadth = self.names.shape[0], self.one[1] - self.one[0], other[1] - other[0]
        tiles_i, tiles_j = (self._filled(length) // self._tile["SIDE"] for length in (height, breadth))
        new = self.scale.new_zeros if upper else self.scale.new_empty  # below the diagonal nothing is written
        of_rows, of_columns = new(2, num_chunks, tiles_j, height), new(2, num_chunks, tiles_i, breadth)
        run(
            _sums_kernel, (_num_tiles(tiles_i, None if upper else tiles_j), num_chunks),
            *self._tokens(), *self.one, *other, self._to_exponent, of_rows, of_columns,
            self.scale if keep is None else keep,
            UPPER=upper, KEEP=keep is not None, **self._constants(),
        )  # fmt: skip
        rows, columns = (part.sum(dim=2, dtype=torch.float64) for part in (of_rows, of_columns))
        return (rows + columns, columns) if upper else (rows, columns)

    def add_gradient(
        self, other: Span, pull: Tensor, kept: Tensor | None, to_one: Tensor, to_other: Tensor | None, fresh: bool
    ) -> None:
        num_chunks, height, breadth = self.names.shape[0], self.one[1] - self.one[0], other[1] - other[0]
        filled = self._filled(height), self._filled(breadth)
        weights = self._new_weights(self._filled(self.side) ** 2, *filled)
        upper = other == self.one
        tiles_i, tiles_j = (length // self._tile["SIDE"] for length in filled)
        run(
            _weights_kernel, (_num_tiles(tiles_i, None if upper else tiles_j), num_chunks),
            *self._tokens(), *self.one, *other, self._to_exponent, *pull.contiguous(),
            self.scale if kept is None else kept, weights, *filled,
            UPPER=upper, IS_KEPT=kept is not None, SPLIT=self._per_weight == 2, **self._constants(),
        )  # fmt: skip
        if upper:
            grid = _num_tiles(filled[0] // _MIRRORED, None), self._per_weight * num_chunks
            run(_mirror_kernel, grid, weights, filled[0], SIDE=_MIRRORED, num_warps=4)
        weights = weights[..., :height, :breadth]
        halves.add_products(to_one, weights, self._factors(other), fresh=fresh)
        if to_other is not None:
            halves.add_products(to_other, weights.mT, self._factors(self.one))

    @property
    def _tile(self) -> dict[str, int]:
        return TILE[self.rows.dtype.itemsize]

    def _filled(self, length: int) -> int:
        """Of whole tiles."""
        return cdiv(length, self._tile["SIDE"]) * self._tile["SIDE"]

    def _tokens(self) -> tuple[Any, ...]:
        """What both kernels of pairs are given first."""
        documents = self.names if self.documents is None else self.documents
        num_chunks, length, width = self.rows.shape[1:]
        return self.rows, self.names, self.scale, documents, num_chunks, *self.rows.stride()[:3], length, width

    def _constants(self) -> dict[str, Any]:
        return {
            "HAS_DOCUMENTS": self.documents is not None,
            "EVEN": self.rows.shape[3] % self._tile["BK"] == 0,
            "PRECISION": "ieee",  # of float32; TF32 would cost a thousandth of the gradient
            "WIDEN": INTERPRETS and self.rows.dtype == torch.bfloat16,
            **self._tile,
        }


_BLOCK_UNIT = 256


def _num_tiles(tiles_i: int, tiles_j: int | None) -> int:
    """Of a block; tiles_j None is a square, of which those on and above the diagonal are computed."""
    return tiles_i * (tiles_i + 1) // 2 if tiles_j is None else tiles_i * tiles_j


add_form("triton", FusedTiles)
