# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""All products in cuBLAS, all that is between them in Triton. This form stays until impl triton has run on a GPU.

Below some 2048 tokens a product gains nothing from its symmetry, and chunks are that short: so the whole square of each
chunk is one batched product, of as many chunks as there is room for. One kernel makes exponentials and sums of it, in
the next pass one kernel makes the gradient's weights W_ij = H_ij / (|e_i| |e_j|), and rows enter both products as they
are (see `halves`). A row of pairs is summed by one program in one order: the same bits every time.

Shapes: m chunks of k tokens with d features; tiles of r rows and s columns, of which a program takes ROWS and COLUMNS
at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from simreg_megatron.kernels import halves
from simreg_megatron.kernels import triton as triton_form
from simreg_megatron.kernels.form import Span
from simreg_megatron.kernels.rows import _copy_kernel, _project_kernel
from simreg_megatron.kernels.triton import cdiv, run
from simreg_megatron.kernels.walk import Given, Slab, Tiles, add_form

LONGEST_TILE = 4096
_TILE_UNIT = 256
_FEATURES = 1024  # of a row at a time
_CHUNKS = 32_767  # the second number of a grid ends at 65,535, and where a weight has two halves, each has its own
BLOCK = {"ROWS": 8, "COLUMNS": 256, "num_warps": 4}
"""What a program holds in registers at a time."""


@triton.jit
def _tokens_of(names, documents, chunk, length, first, at, size, HAS_DOCUMENTS: tl.constexpr):
    """Number, name and document of the tokens of a tile; those beyond its end have no name."""
    token = chunk.to(tl.int64) * length + first + at
    name = tl.load(names + token, mask=at < size, other=-1)
    document = tl.zeros_like(token)
    if HAS_DOCUMENTS:
        document = tl.load(documents + token, mask=at < size, other=-1)
    return token, name, document


@triton.jit
def _exponentials(products, scale_i, scale_j, position_i, position_j, name_i, name_j, document_i, document_j, factor):
    """P_ij [ROWS, COLUMNS], 0 for pairs that do not meet and for a token with itself."""
    cosines = products * (scale_i[:, None] * scale_j[None, :])  # the same bits with i and j exchanged
    exponentials = tl.exp2((cosines - 1.0) * factor)
    meet = (name_i >= 0)[:, None] & (name_j >= 0)[None, :] & (document_i[:, None] == document_j[None, :])
    return tl.where(meet & (position_i[:, None] != position_j[None, :]), exponentials, 0.0)


@triton.jit
def _sums_kernel(
    products, stride_i, stride_j, names, scale, documents, length, first_i, height, first_j, breadth, factor,
    sums, keep, KEEP: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums of P over some rows of the products [m, r, s], to sums [2, m, r]; P itself to keep [m, r, s]."""
    chunk = tl.program_id(1)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token_i, name_i, document_i = _tokens_of(names, documents, chunk, length, first_i, i, height, HAS_DOCUMENTS)
    scale_i = tl.load(scale + token_i, mask=i < height, other=0.0)
    positives, negatives = tl.zeros((ROWS,), dtype=tl.float64), tl.zeros((ROWS,), dtype=tl.float64)
    pairs = chunk.to(tl.int64) * height * breadth
    for start in range(0, breadth, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        token_j, name_j, document_j = _tokens_of(names, documents, chunk, length, first_j, j, breadth, HAS_DOCUMENTS)
        scale_j = tl.load(scale + token_j, mask=j < breadth, other=0.0)
        at = pairs + i.to(tl.int64)[:, None] * stride_i + j[None, :] * stride_j
        inside = (i < height)[:, None] & (j < breadth)[None, :]
        exponentials = _exponentials(
            tl.load(products + at, mask=inside, other=0.0), scale_i, scale_j, first_i + i, first_j + j, name_i, name_j,
            document_i, document_j, factor,
        )  # fmt: skip
        if KEEP:
            tl.store(keep + at, exponentials.to(keep.dtype.element_ty), mask=inside)
        positive = tl.where(name_i[:, None] == name_j[None, :], exponentials, 0.0)
        positives += tl.sum(positive, axis=1)
        negatives += tl.sum(exponentials - positive, axis=1)  # exact: one of the two is 0
    to = sums + chunk.to(tl.int64) * height + i
    tl.store(to, positives, mask=i < height)
    tl.store(to + tl.num_programs(1).to(tl.int64) * height, negatives, mask=i < height)


@triton.jit
def _weights_kernel(
    source, names, scale, documents, pull, length, first_i, height, first_j, breadth, factor, weights,
    IS_KEPT: tl.constexpr, SPLIT: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of W_ij, from the products or (IS_KEPT) from P, to weights [m, r, s]; SPLIT: the rest to [2, m, r, s]."""
    chunk, num_chunks = tl.program_id(2), tl.num_programs(2).to(tl.int64)
    i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    token_i, name_i, document_i = _tokens_of(names, documents, chunk, length, first_i, i, height, HAS_DOCUMENTS)
    token_j, name_j, document_j = _tokens_of(names, documents, chunk, length, first_j, j, breadth, HAS_DOCUMENTS)
    scale_i = tl.load(scale + token_i, mask=i < height, other=0.0)
    scale_j = tl.load(scale + token_j, mask=j < breadth, other=0.0)
    at = chunk.to(tl.int64) * height * breadth + i.to(tl.int64)[:, None] * breadth + j[None, :]
    inside = (i < height)[:, None] & (j < breadth)[None, :]
    exponentials = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    if not IS_KEPT:
        exponentials = _exponentials(
            exponentials, scale_i, scale_j, first_i + i, first_j + j, name_i, name_j, document_i, document_j, factor
        )  # fmt: skip
    a_i, a_j = tl.load(pull + token_i, mask=i < height, other=0.0), tl.load(pull + token_j, mask=j < breadth, other=0.0)
    pull_b = pull + num_chunks * length
    b_i = tl.load(pull_b + token_i, mask=i < height, other=0.0)
    b_j = tl.load(pull_b + token_j, mask=j < breadth, other=0.0)
    same = name_i[:, None] == name_j[None, :]
    found = tl.where(same, -(b_i[:, None] + b_j[None, :]), a_i[:, None] + a_j[None, :]) * exponentials
    found *= scale_i[:, None] * scale_j[None, :]
    rounded = found.to(weights.dtype.element_ty)
    tl.store(weights + at, rounded, mask=inside)
    if SPLIT:
        rest = (found - rounded.to(tl.float32)).to(weights.dtype.element_ty)
        tl.store(weights + num_chunks * height * breadth + at, rest, mask=inside)


class GemmTiles(Tiles):
    """Each tile is a matrix of products in float32, and one of weights in the rows' precision."""

    compares_labels = True

    _products: Tensor | None = None
    _left: tuple[Span, Tensor] | None = None

    def __init__(self, given: Given, slab: Slab, temperature: float, side: int) -> None:
        super().__init__(given._replace(rows=_readable(given.rows)), slab, temperature, side)
        self._element, self._per_weight = weights_of(given)
        self._weights: Tensor | None = None
        self._held: tuple[Span, tuple[Tensor, ...]] | None = None

    @staticmethod
    def kept_dtype(rows: Tensor, length: int, by_document: bool) -> torch.dtype | None:
        if rows.dtype == torch.float32:
            return torch.float32
        return halves.kept_dtype(length, rows.shape[-1], by_document)

    def project(self, of_unit: Tensor, span: Span, grad: Tensor | None) -> None:
        grad = of_unit.unflatten(0, self.rows.shape[:2]) if grad is None else grad
        run(
            _project_kernel, (span[1] - span[0], self.names.shape[0]),
            *_described(self.rows, self.names), span[0], self.scale,
            of_unit, *of_unit.stride()[:2], grad, *grad.stride()[:3], FEATURES=_features(self.rows.shape[3]),
        )  # fmt: skip

    def _copies(self, span: Span, dtype: torch.dtype, count: int) -> Tensor:
        """[1 or 2, m, r, d] that add up to the rows, 0 where not usable: NaN times 0 would be NaN."""
        height, width = span[1] - span[0], self.rows.shape[3]
        copies = self.rows.new_empty(count, self.names.shape[0], height, width, dtype=dtype)
        run(
            _copy_kernel, (height, self.names.shape[0]), *_described(self.rows, self.names), span[0], copies,
            SPLIT=count == 2, FEATURES=_features(width),
        )  # fmt: skip
        return copies

    def _factors(self, span: Span) -> tuple[Tensor, ...]:
        """Those in the weights' type, one or two; of the span that is held they are made once."""
        if self._held is not None and self._held[0] == span:
            return self._held[1]
        count = self._per_weight if self.rows.dtype == torch.float16 else 1
        copies = tuple(self._copies(span, self._element, count))
        if span == self.one:
            self._held = span, copies
        return copies

    def _new_weights(self, most: int, *shape: int) -> Tensor:
        """[1 or 2, m, *shape] over those before; `most`: pairs of the largest tile there is."""
        num_chunks = self.names.shape[0]
        if self._weights is None:
            self._weights = self.rows.new_empty(self._per_weight * num_chunks * most, dtype=self._element)
        shape = self._per_weight, num_chunks, *shape
        return self._weights[: math.prod(shape)].view(shape)

    @property
    def _to_exponent(self) -> float:
        return math.log2(math.e) / self.temperature

    @classmethod
    def sides(cls, rows: Tensor) -> Sequence[int]:
        _readable(rows)
        return range(LONGEST_TILE, 0, -_TILE_UNIT)

    @staticmethod
    def bytes_per_chunk(given: Given, side: int) -> int:
        element, per_weight = weights_of(given)
        return side**2 * (4 + per_weight * element.itemsize) + (2 if given.rows.shape[2] > side else 1) * side * max(
            bytes_of_factor(given), given.rows.shape[3] * given.rows.dtype.itemsize
        )

    def sums(self, other: Span, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        products = self._multiply(other)
        of_rows = self._sum(products, self.one, other, keep)
        return of_rows, of_rows if other == self.one else self._sum(products.mT, other, self.one, None)

    def _sum(self, products: Tensor, one: Span, other: Span, keep: Tensor | None) -> Tensor:
        """[2, m, r]"""
        num_chunks, height, breadth = products.shape
        sums = products.new_empty(2, num_chunks, height, dtype=torch.float64)
        run(
            _sums_kernel, (cdiv(height, BLOCK["ROWS"]), num_chunks),
            products, *products.stride()[1:], *self._tokens(), one[0], height, other[0], breadth, self._to_exponent,
            sums, products if keep is None else keep, KEEP=keep is not None, **self._constants(),
        )  # fmt: skip
        return sums

    def add_gradient(
        self, other: Span, pull: Tensor, kept: Tensor | None, to_one: Tensor, to_other: Tensor | None, fresh: bool
    ) -> None:
        height, breadth = self.one[1] - self.one[0], other[1] - other[0]
        source = self._multiply(other) if kept is None else kept
        weights = self._new_weights(self.side**2, height, breadth)
        run(
            _weights_kernel,
            (cdiv(breadth, BLOCK["COLUMNS"]), cdiv(height, BLOCK["ROWS"]), self.names.shape[0]),
            source, *self._tokens(pull.contiguous()), self.one[0], height, other[0], breadth, self._to_exponent,
            weights, IS_KEPT=kept is not None, SPLIT=self._per_weight == 2, **self._constants(),
        )  # fmt: skip
        halves.add_products(to_one, weights, self._factors(other), fresh=fresh)
        if to_other is not None:
            halves.add_products(to_other, weights.mT, self._factors(self.one))

    def _multiply(self, other: Span) -> Tensor:
        """<e_i, e_j> [m, r, s] in float32, over those before."""
        if self._left is None or self._left[0] != self.one:
            self._left = self.one, self._rows(self.one)
        left = self._left[1]
        right = left if other == self.one else self._rows(other)
        if self._products is None:
            self._products = self.scale.new_empty(self.names.shape[0] * self.side**2)
        shape = len(left), left.shape[1], right.shape[1]
        out = self._products[: shape[0] * shape[1] * shape[2]].view(shape)
        return halves.widening_bmm(left, right.mT, out)

    def _rows(self, span: Span) -> Tensor:
        """[m, r, d] in their own type, 0 where not usable; the same copy that the gradient's product takes."""
        if self._element == self.rows.dtype:
            return self._factors(span)[0]
        return self._copies(span, self.rows.dtype, 1)[0]

    def _tokens(self, *pull: Tensor) -> tuple[Any, ...]:
        """What both kernels are told of the tokens."""
        documents = self.names if self.documents is None else self.documents
        return self.names, self.scale, documents, *pull, self.rows.shape[2]

    def _constants(self) -> dict[str, Any]:
        return {"HAS_DOCUMENTS": self.documents is not None, **BLOCK}


def _readable(rows: Tensor) -> Tensor:
    """The rows, with their features side by side.

    Raises:
        ValueError: they are of a type, on a device or too many for these kernels.
    """
    why = ""
    if rows.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        why = f"computes float16, bfloat16 and float32, not {rows.dtype}"
    elif rows.device.type not in ("cuda", "meta") and not triton_form.INTERPRETS:
        why = f"needs a CUDA device, and the rows are on {rows.device}"
    elif not halves.BMM_WIDENS:
        why = f"needs torch 2.8 or newer, this is {torch.__version__}"
    elif (num_chunks := rows.shape[0] * rows.shape[1]) > _CHUNKS:
        why = f"computes at most {_CHUNKS} chunks at once, and these are {num_chunks}"
    if why:
        raise ValueError(f"impl 'gemm' {why}: use impl 'tiled'.")
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def weights_of(given: Given) -> tuple[torch.dtype, int]:
    """Type of the weights, and how many numbers of it add up to one."""
    if given.rows.dtype == torch.float32:
        return torch.float32, 1
    return torch.bfloat16, halves.numbers_per_weight(*given.rows.shape[2:], given.documents is not None)  # type: ignore[call-arg]


def bytes_of_factor(given: Given) -> int:
    """Of one token's row among the factors of a product."""
    element, per_weight = weights_of(given)
    return given.rows.shape[3] * element.itemsize * (per_weight if given.rows.dtype == torch.float16 else 1)


def _described(rows: Tensor, names: Tensor) -> tuple[Any, ...]:
    """What every kernel of rows is given first."""
    return rows, names, rows.shape[1], *rows.stride()[:3], rows.shape[2], rows.shape[3]


def _features(width: int) -> int:
    return min(_FEATURES, 1 << (width - 1).bit_length())


add_form("gemm", GemmTiles)
