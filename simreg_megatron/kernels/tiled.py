# SPDX-License-Identifier: Apache-2.0
"""SimReg by tiles, in plain torch: every pair computed once, nothing of size k x k kept.

With P_ij = exp((cos(e_i, e_j) - 1) / tau) and the token itself among its positives, S_pos lies in [1, k]: the shift by
1 / tau needs no maximum, and one exponential serves row i and row j. The term is log1p(S_neg / S_pos), never a
difference of two large logarithms.

The gradient is one symmetric matrix times the unit rows: with u = S_neg / S_pos and g the gradient that reaches u,

    a_i = g_i / (tau S_pos_i),  b_i = a_i u_i,  H_ij = P_ij (a_i + a_j) for other labels, -P_ij (b_i + b_j) for equal,

and dL/de_i = (h_i - <h_i, e^_i> e^_i) / |e_i| with h = H e^. Tokens that are no anchors have a = b = 0. Kept between
forward and backward beside the embeddings: four numbers a token; P is computed again.

Shapes: m chunks of k tokens with d features; p anchors of each; tiles of r rows and c columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

Span = tuple[int, int]

TILE = {"cpu": 512, "cuda": 1024}
"""Longest side of a tile. On a CPU a tile should lie in its cache; on a GPU it should fill the device."""
WORKSPACE = 32 << 20
"""Bytes that the pairs of one step may take: as many chunks go together as fit, but at least one."""
_BYTES_PER_PAIR = 16  # products, exponentials, coefficients and masks of a tile, at their most


class Tokens(NamedTuple):
    """What the pairs are made of."""

    rows: Tensor  # [m, k, d]; those that are not usable may hold anything
    labels: Tensor  # [m, k] integer
    usable: Tensor  # [m, k] bool
    documents: Tensor | None  # [m, k]; tokens of different documents never meet


def contrast_ratio(
    tokens: Tokens, *, anchors: Span, temperature: float, stored_dtype: torch.dtype | None = None
) -> Tensor:
    """u_i = sum_{j in N_i} P_ij / sum_{j in P_i} P_ij of the anchors, [m, p]; SimReg's term is log1p(u_i).

    Args:
        tokens: float16, bfloat16, float32 or float64 rows; half precision is multiplied as it is and summed in
            float32, its norms applied afterwards.
        anchors: first and last (not included) position with a ratio; the gradient reaches all rows.
        temperature: tau, above 0.
        stored_dtype: float16 or bfloat16 where float32 rows hold such values and nothing finer: then their
            products are computed in it, exactly.

    Returns:
        float32 (float64 for float64). 0 for an anchor without negatives and for one that is not usable.
    """
    return _ContrastRatio.apply(*tokens, anchors, temperature, stored_dtype)


class _ContrastRatio(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        labels: Tensor,
        usable: Tensor,
        documents: Tensor | None,
        anchors: Span,
        temperature: float,
        stored_dtype: torch.dtype | None,
    ) -> Tensor:
        tokens = Tokens(rows, labels, usable, documents)
        largest, inverse = _scales(tokens)
        # Of positives and of negatives; float64 because many tiles are added up.
        sums = torch.zeros(2, *labels.shape, dtype=torch.float64, device=rows.device)
        sums[0] = usable  # the token itself
        for slab in _slabs(tokens, anchors):
            pairs = _Pairs(tokens, largest, inverse, slab, temperature, stored_dtype)
            for first, second in _tiles(anchors, labels.shape[1], rows.device.type):
                exponentials, same = pairs.exponentials(first, second)
                positive = torch.where(same, exponentials, 0.0)
                negative = exponentials - positive  # exact: one of the two is 0
                sums[0, slab, slice(*first)] += positive.sum(dim=-1)
                sums[1, slab, slice(*first)] += negative.sum(dim=-1)
                if first != second and anchors[0] <= second[0] < anchors[1]:
                    sums[0, slab, slice(*second)] += positive.sum(dim=-2)
                    sums[1, slab, slice(*second)] += negative.sum(dim=-2)
        own = slice(*anchors)
        total = torch.where(usable[:, own], sums[0, :, own], 1.0).to(inverse.dtype)
        doubt = largest[:, own] * 0.0  # NaN for a row that is not finite: one that meets nobody would pass as a 0
        ratio = torch.where(usable[:, own], sums[1, :, own].to(inverse.dtype) / total + doubt, 0.0)
        ctx.save_for_backward(rows, labels, usable, documents, largest, inverse, total, ratio)
        ctx.options = anchors, temperature, stored_dtype
        return ratio

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, labels, usable, documents, largest, inverse, total, ratio = ctx.saved_tensors
        anchors, temperature, stored_dtype = ctx.options
        tokens = Tokens(rows, labels, usable, documents)
        # Of tokens that are no anchors both are 0.
        of_negatives = torch.zeros_like(inverse)
        of_negatives[:, slice(*anchors)] = torch.where(ratio > 0, grads[0] / (total * temperature), 0.0)
        of_positives = torch.zeros_like(inverse)
        of_positives[:, slice(*anchors)] = of_negatives[:, slice(*anchors)] * ratio

        grad_rows = torch.zeros_like(rows, memory_format=torch.contiguous_format)
        for slab in _slabs(tokens, anchors):
            pairs = _Pairs(tokens, largest, inverse, slab, temperature, stored_dtype)
            grad_unit = grad_rows[slab].to(inverse.dtype)  # the same memory, unless it is half precision
            for first, second in _tiles(anchors, labels.shape[1], rows.device.type):
                exponentials, same = pairs.exponentials(first, second)
                coefficients = torch.where(
                    same,
                    -_outer_sum(of_positives[slab], first, second),
                    _outer_sum(of_negatives[slab], first, second),
                )
                coefficients *= exponentials
                grad_unit[:, slice(*first)] += pairs.times_unit(coefficients, second)
                if first != second:
                    grad_unit[:, slice(*second)] += pairs.times_unit(coefficients.mT, first)
            for span in _cut((0, labels.shape[1]), _strip(grad_unit)):
                grad_rows[slab, slice(*span)] = pairs.grad_of_rows(grad_unit[:, slice(*span)], span)
        return grad_rows, None, None, None, None, None, None


class _Pairs:
    """Cosines of the chunks in one slab, tile by tile."""

    def __init__(
        self,
        tokens: Tokens,
        largest: Tensor,
        inverse: Tensor,
        slab: slice,
        temperature: float,
        stored_dtype: torch.dtype | None,
    ) -> None:
        self._rows, self._labels, self._usable = tokens.rows[slab], tokens.labels[slab], tokens.usable[slab]
        self._documents = None if tokens.documents is None else tokens.documents[slab]
        self._largest, self._inverse = largest[slab], inverse[slab]
        self._temperature = temperature
        self._halves = stored_dtype or tokens.rows.dtype

    def exponentials(self, first: Span, second: Span) -> tuple[Tensor, Tensor]:
        """P_ij [m, r, c], 0 for pairs that do not meet and for a token with itself; and whether labels are equal."""
        exponents = self._cosines(first, second).sub_(1.0).div_(self._temperature)
        # What would be subnormal is 0: it adds nothing to sums of at least 1, and a CPU computes it very slowly.
        exponentials = exponents.masked_fill_(
            exponents < math.log(torch.finfo(exponents.dtype).tiny) + 8, -math.inf
        ).exp_()
        meet = _outer(torch.logical_and, self._usable, first, second)
        if self._documents is not None:
            meet &= _outer(torch.eq, self._documents, first, second)
        if first == second:
            meet.diagonal(dim1=-2, dim2=-1).fill_(False)
        exponentials = torch.where(meet, exponentials, 0.0)  # a token left out may hold anything, even NaN
        return exponentials, _outer(torch.eq, self._labels, first, second)

    def times_unit(self, coefficients: Tensor, span: Span) -> Tensor:
        """[m, r, c] times the unit rows of the span [m, c, d]."""
        if self._multiplies_halves and self._halves == torch.bfloat16:  # float16 would lose the small ones
            scaled = coefficients * (self._inverse / self._largest)[:, None, slice(*span)]
            return _matmul(scaled.to(torch.bfloat16), self._used(span).to(torch.bfloat16))
        return coefficients @ self._unit(span)

    def grad_of_rows(self, grad_unit: Tensor, span: Span) -> Tensor:
        """From the gradient of the unit rows in the span to that of the rows; 0 for those that are not usable."""
        unit, part = self._unit(span), slice(*span)
        radial = (grad_unit * unit).sum(dim=-1, keepdim=True)
        grad = (grad_unit - radial * unit) * (self._inverse / self._largest)[:, part].unsqueeze(-1)
        return torch.where(self._usable[:, part].unsqueeze(-1), grad, 0.0)

    @property
    def _multiplies_halves(self) -> bool:
        return self._rows.is_cuda and self._halves in (torch.float16, torch.bfloat16)

    def _cosines(self, first: Span, second: Span) -> Tensor:
        if self._multiplies_halves:
            products = _matmul(self._used(first).to(self._halves), self._used(second).to(self._halves).mT)
            norms = self._inverse / self._largest
            return products.mul_(norms[:, slice(*first), None]).mul_(norms[:, None, slice(*second)])
        return self._unit(first) @ self._unit(second).mT

    def _used(self, span: Span) -> Tensor:
        part = slice(*span)
        return torch.where(self._usable[:, part].unsqueeze(-1), self._rows[:, part], 0.0)

    def _unit(self, span: Span) -> Tensor:
        """e / |e| [m, c, d]; the largest entry is divided out first, so that nothing overflows."""
        part = slice(*span)
        return self._used(span) / self._largest[:, part].unsqueeze(-1) * self._inverse[:, part].unsqueeze(-1)


def _scales(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The largest entry of each row, and 1 / |row / largest|, both [m, k]; 1 where not usable."""
    rows = tokens.rows.detach()
    largest = torch.ones(rows.shape[:2], dtype=torch.promote_types(rows.dtype, torch.float32), device=rows.device)
    inverse = torch.ones_like(largest)
    for span in _cut((0, rows.shape[1]), _strip(rows)):
        part = slice(*span)
        largest[:, part] = torch.where(tokens.usable[:, part], rows[:, part].abs().amax(dim=-1), 1.0)
        scaled = rows[:, part] / largest[:, part].unsqueeze(-1)
        norms = torch.linalg.vector_norm(scaled, dim=-1, dtype=largest.dtype)
        inverse[:, part] = torch.where(tokens.usable[:, part], norms.reciprocal(), 1.0)
    return largest, inverse


def _strip(rows: Tensor) -> int:
    """How many tokens of all chunks at once keep some copies of their rows inside the workspace."""
    return max(1, WORKSPACE // max(1, 32 * rows.shape[0] * rows.shape[2]))


def _slabs(tokens: Tokens, anchors: Span) -> Iterator[slice]:
    """Chunks that are worked on together."""
    side = min(_tile(tokens.rows.device.type), tokens.labels.shape[1])
    count = max(1, WORKSPACE // max(1, side * side * _BYTES_PER_PAIR))
    for first in range(0, tokens.labels.shape[0], count):
        yield slice(first, first + count)


def _tile(device_type: str) -> int:
    return TILE.get(device_type, TILE["cuda"])


def _tiles(anchors: Span, length: int, device_type: str) -> Iterator[tuple[Span, Span]]:
    """Pairs of spans: anchors with themselves in the upper triangle, then with all other tokens."""
    size = _tile(device_type)
    own = list(_cut(anchors, size))
    others = [*_cut((0, anchors[0]), size), *_cut((anchors[1], length), size)]
    for number, first in enumerate(own):
        yield from ((first, second) for second in (*own[number:], *others))


def _cut(span: Span, size: int) -> Iterator[Span]:
    for first in range(span[0], span[1], size):
        yield first, min(first + size, span[1])


def _outer(operator: Any, values: Tensor, first: Span, second: Span) -> Tensor:
    return operator(values[:, slice(*first)].unsqueeze(-1), values[:, slice(*second)].unsqueeze(-2))


def _outer_sum(values: Tensor, first: Span, second: Span) -> Tensor:
    return _outer(torch.add, values, first, second)


def _matmul(left: Tensor, right: Tensor) -> Tensor:
    """Half precision in, float32 out: products are never rounded to half precision."""
    return torch.bmm(left, right, out_dtype=torch.float32)
