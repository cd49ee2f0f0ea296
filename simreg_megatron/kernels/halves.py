# SPDX-License-Identifier: Apache-2.0
"""Products with rows of half precision, as tensor cores take them: halves in, float32 out.

The rows enter as they are. The gradient's weights W_ij = H_ij / (|e_i| |e_j|) are rounded to bfloat16, as float16 would
lose the small ones. Each is off by some 1e-3 then, and the gradient by what is left of that in a sum over many pairs:
some 0.3 / sqrt(k d) for wide rows, 0.4 / sqrt(k d) where the exponentials behind the weights were kept in bfloat16, too
(benchmarks/results/bf16_weights.csv). Where that is not well below 3e-4, a weight is the sum of two such numbers, and
the product is made twice: chunks are short there, or rows narrow, so that it costs little.

Shapes: m chunks of k tokens with d features; r rows and s columns of a tile.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

NARROWEST = 1024
"""Features. A narrower row has few close neighbours that outweigh all others, however many tokens there are."""
FEWEST = 1 << 22
"""Tokens in a chunk times features: from there on one number a weight costs 2.1e-4 at most."""
BMM_WIDENS = "dtype" in torch.ops.aten.bmm.overloads()  # torch 2.8 and newer


def multiplies_halves(rows: Tensor) -> bool:
    """Whether products take the rows as they are. A CPU has no such product: there the rows are widened first."""
    return rows.is_cuda and rows.dtype.itemsize == 2 and BMM_WIDENS


def numbers_per_weight(length: int, width: int, by_document: bool) -> int:
    """1 or 2: how many bfloat16 numbers are added up to a weight of the gradient.

    By document a token may meet few others, and how many is known to the device only.
    """
    return 1 if width >= NARROWEST and length * width >= FEWEST and not by_document else 2


def kept_dtype(length: int, width: int, by_document: bool) -> torch.dtype | None:
    """Of exponentials: as exact as the weights. Below 2048 features it is no faster to read than to compute them."""
    if width < 2048:
        return None
    return torch.bfloat16 if numbers_per_weight(length, width, by_document) == 1 else torch.float32


def split(numbers: Tensor, into: Tensor) -> Tensor:
    """`numbers`, which are lost, as the sum of one or two in bfloat16: into [1 or 2, ...]."""
    into[0].copy_(numbers)
    if len(into) == 2:
        into[1].copy_(numbers.sub_(into[0]))
    return into


def factors(rows: Tensor, count: int) -> tuple[Tensor, ...]:
    """Rows as numbers in bfloat16 that add up to them: float16 has three bits more, which two of them hold."""
    if rows.dtype == torch.bfloat16:
        return (rows,)
    return tuple(split(rows.clone(), rows.new_empty(count, *rows.shape, dtype=torch.bfloat16)))


def widening_bmm(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """left right [m, r, s]: products are never rounded to half precision."""
    if left.is_cuda and left.dtype != out.dtype:
        return torch.bmm(left, right, out_dtype=out.dtype, out=out)
    return torch.bmm(left.to(out.dtype), right.to(out.dtype), out=out)


def add_products(to: Tensor, weights: Tensor, rows: tuple[Tensor, ...], *, fresh: bool = False) -> None:
    """Add sum_i weights_i sum_j rows_j to `to` [m, r, d], but for what is smaller than either rounding.

    Args:
        weights: [1 or 2, m, r, s].
        rows: one or two of [m, s, d].
        fresh: `to` holds nothing yet.
    """
    for (i, weight), (j, row) in product(enumerate(weights), enumerate(rows)):
        if i + j < 2:
            _add_product(to, weight, row, beta=0 if fresh and i + j == 0 else 1)


def _add_product(to: Tensor, weights: Tensor, rows: Tensor, *, beta: int) -> None:
    if to.is_cuda and weights.dtype != to.dtype:
        torch.baddbmm(to, weights, rows, out_dtype=to.dtype, out=to, beta=beta)
    else:
        to.baddbmm_(weights.to(to.dtype), rows.to(to.dtype), beta=beta)
