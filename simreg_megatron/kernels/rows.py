# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""What the Triton forms do to rows, one program a row: norms, copies for a product, and the projection at the end.

Shapes: m chunks of k tokens with d features, c of them in each sequence; r rows of a span. Features are only ever a
loop, so any width goes.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from simreg_megatron.kernels import halves
from simreg_megatron.kernels.walk import Given, Slab, Span, Tiles

_FEATURES = 1024  # of a row at a time
_CHUNKS = 32_767  # the second number of a grid ends at 65,535, and where a weight has two halves, each has its own
_TOKENS = 512  # of those that a program takes, where it takes no rows


def run(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch: one place, so that launches can be counted where no GPU is.

    Where the first argument is: Triton itself takes the current device, whatever device its tensors are on.
    """
    first = arguments[0]
    with torch.cuda.device_of(first) if first.is_cuda else contextlib.nullcontext():
        kernel[grid](*arguments, **constants)


@triton.jit
def _row_of(rows, names, chunks, stride_b, stride_c, stride_k, length, width, row, chunk):
    """Where a row begins, its token's number, and how many of its features may be read: 0 where it is not usable."""
    token = chunk.to(tl.int64) * length + row
    at = rows + (chunk // chunks).to(tl.int64) * stride_b + (chunk % chunks).to(tl.int64) * stride_c
    return at + row.to(tl.int64) * stride_k, token, tl.where(tl.load(names + token) >= 0, width, 0)


@triton.jit
def _norms_kernel(
    rows, names, chunks, stride_b, stride_c, stride_k, length, width, scale, FEATURES: tl.constexpr
):  # fmt: skip
    """1 / |e|, or 1 where the row is not usable."""
    given, token, readable = _row_of(
        rows, names, chunks, stride_b, stride_c, stride_k, length, width, tl.program_id(0), tl.program_id(1)
    )
    features = tl.arange(0, FEATURES)
    squares = tl.zeros((FEATURES,), dtype=tl.float64)  # of float32: neither too large nor too small, rounded once
    for start in range(0, width, FEATURES):
        numbers = tl.load(given + start + features, mask=features + start < readable, other=0.0).to(tl.float64)
        squares += numbers * numbers
    norm = tl.sqrt(tl.sum(squares, axis=0))
    tl.store(scale + token, tl.where(readable > 0, 1.0 / norm, 1.0).to(tl.float32))


@triton.jit
def _copy_kernel(
    rows, names, chunks, stride_b, stride_c, stride_k, length, width, first, copies,
    SPLIT: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """A row, or 0 where it is not usable, to copies [m, r, d]; SPLIT: what their type leaves of it to [2, m, r, d]."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    given, _, readable = _row_of(
        rows, names, chunks, stride_b, stride_c, stride_k, length, width, first + row, chunk
    )  # fmt: skip
    size = tl.num_programs(0).to(tl.int64) * width
    to = copies + chunk * size + row.to(tl.int64) * width
    features = tl.arange(0, FEATURES)
    for start in range(0, width, FEATURES):
        numbers = tl.load(given + start + features, mask=features + start < readable, other=0.0)
        rounded = numbers.to(copies.dtype.element_ty)
        tl.store(to + start + features, rounded, mask=features + start < width)
        if SPLIT:
            rest = (numbers.to(tl.float32) - rounded.to(tl.float32)).to(copies.dtype.element_ty)
            tl.store(to + tl.num_programs(1) * size + start + features, rest, mask=features + start < width)


@triton.jit
def _project_kernel(
    rows, names, chunks, stride_b, stride_c, stride_k, length, width, first, scale,
    summed, summed_chunk, summed_row, grad, grad_b, grad_c, grad_row, FEATURES: tl.constexpr,
):  # fmt: skip
    """g - <g, e^> e^, or 0 where the row is not usable."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    given, token, readable = _row_of(
        rows, names, chunks, stride_b, stride_c, stride_k, length, width, first + row, chunk
    )  # fmt: skip
    inverse = tl.load(scale + token)
    g = summed + chunk.to(tl.int64) * summed_chunk + row.to(tl.int64) * summed_row
    to = grad + (chunk // chunks).to(tl.int64) * grad_b + (chunk % chunks).to(tl.int64) * grad_c
    to += row.to(tl.int64) * grad_row
    features = tl.arange(0, FEATURES)
    radial = tl.zeros((FEATURES,), dtype=tl.float32)
    for start in range(0, width, FEATURES):
        inside = features + start < readable
        unit = tl.load(given + start + features, mask=inside, other=0.0).to(tl.float32) * inverse
        radial += unit * tl.load(g + start + features, mask=inside, other=0.0)
    along = tl.sum(radial, axis=0)
    for start in range(0, width, FEATURES):
        inside = features + start < readable
        unit = tl.load(given + start + features, mask=inside, other=0.0).to(tl.float32) * inverse
        found = tl.load(g + start + features, mask=inside, other=0.0) - along * unit
        tl.store(to + start + features, found.to(grad.dtype.element_ty), mask=features + start < width)


@triton.jit
def _ratio_kernel(sums, names, scale, total, ratio, count, SIZE: tl.constexpr):
    """S_pos and S_neg / S_pos from the sums [2, tokens] over all others; see `walk.ratio_of`."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    positive = (tl.load(sums + at, mask=inside, other=0.0) + 1.0).to(tl.float32)
    negative = tl.load(sums + count + at, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.load(scale + at, mask=inside, other=1.0)
    doubt = tl.where(inverse == 0.0, float("nan"), inverse * 0.0)  # 0, but NaN for a row that is not finite
    usable = tl.load(names + at, mask=inside, other=-1) >= 0
    tl.store(total + at, positive, mask=inside)
    tl.store(ratio + at, tl.where(usable, negative / positive + doubt, 0.0), mask=inside)


@triton.jit
def _pull_kernel(grad, total, ratio, temperature, pull, count, SIZE: tl.constexpr):
    """(a, b) [2, tokens]; see `walk.anchor_pull`."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    of_pairs = tl.load(ratio + at, mask=inside, other=0.0)
    found = tl.load(grad + at, mask=inside, other=0.0) / (tl.load(total + at, mask=inside, other=1.0) * temperature)
    found = tl.where(of_pairs == 0.0, 0.0, found)
    tl.store(pull + at, found, mask=inside)
    tl.store(pull + count + at, found * of_pairs, mask=inside)


INTERPRETS = not isinstance(_norms_kernel, triton.runtime.JITFunction)
"""Triton runs its kernels in Python, on the CPU: TRITON_INTERPRET=1 in the environment when it is imported."""


class TritonTiles(Tiles):
    """Tiles of half precision or float32 on a GPU; how pairs are computed is left to the forms."""

    impl: str  # as users name it

    def __init__(self, given: Given, slab: Slab, temperature: float, side: int) -> None:
        super().__init__(given._replace(rows=self._readable(given.rows)), slab, temperature, side)
        self._element, self._per_weight = weights_of(given)
        self._weights: Tensor | None = None
        self._held: tuple[Span, tuple[Tensor, ...]] | None = None

    @staticmethod
    def kept_dtype(rows: Tensor, length: int, by_document: bool) -> torch.dtype | None:
        if rows.dtype == torch.float32:
            return torch.float32
        return halves.kept_dtype(length, rows.shape[-1], by_document)

    @classmethod
    def inverse_norms(cls, rows: Tensor, names: Tensor) -> Tensor:
        rows = cls._readable(rows)
        scale = names.new_empty(names.shape, dtype=torch.float32)
        num_sequences, num_chunks, length, width = rows.shape
        if scale.numel():
            grid = length, num_sequences * num_chunks
            run(_norms_kernel, grid, *_described(rows, names), scale, FEATURES=_features(width))
        return scale

    @classmethod
    def ratio_of(cls, sums: Tensor, names: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        total, ratio = (scale.new_empty(names.shape) for _ in range(2))
        if count := names.numel():
            given = (part.contiguous() for part in (sums, names, scale))
            run(_ratio_kernel, (cdiv(count, _TOKENS),), *given, total, ratio, count, SIZE=_TOKENS)
        return total, ratio

    @classmethod
    def anchor_pull(cls, grad: Tensor, total: Tensor, ratio: Tensor, temperature: float) -> Tensor:
        if torch.compiler.is_compiling():  # it makes one kernel of plain operators itself
            return super().anchor_pull(grad, total, ratio, temperature)
        pull = total.new_empty(2, *total.shape)
        if count := total.numel():
            given = (part.contiguous() for part in (grad, total, ratio))
            run(_pull_kernel, (cdiv(count, _TOKENS),), *given, temperature, pull, count, SIZE=_TOKENS)
        return pull

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
    def _readable(cls, rows: Tensor) -> Tensor:
        """The rows, with their features side by side."""
        cls.check_dtype(rows)
        if not (rows.is_cuda or INTERPRETS):
            raise ValueError(
                f"impl {cls.impl!r} needs a CUDA device, and the rows are on {rows.device}: use impl 'tiled'."
            )
        if not halves.BMM_WIDENS:
            raise ValueError(
                f"impl {cls.impl!r} needs torch 2.8 or newer, this is {torch.__version__}: use impl 'tiled'."
            )
        if (num_chunks := rows.shape[0] * rows.shape[1]) > _CHUNKS:
            raise ValueError(
                f"impl {cls.impl!r} computes at most {_CHUNKS} chunks at once, and these are {num_chunks}: "
                "take larger chunks or a smaller micro-batch, or use impl 'tiled'."
            )
        return rows if rows.stride(-1) == 1 else rows.contiguous()

    @classmethod
    def check_dtype(cls, rows: Tensor) -> None:
        """ValueError for a type that Triton's kernels do not compute."""
        if rows.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise ValueError(
                f"impl {cls.impl!r} computes float16, bfloat16 and float32, not {rows.dtype}: use impl 'tiled'."
            )


def cdiv(count: int, size: int) -> int:
    return -(-count // size)  # triton.cdiv costs the host 10 us a call


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
