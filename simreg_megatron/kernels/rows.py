# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""What impl gemm does to rows, one program a row: copies for a product, and the projection at the end.

Shapes: m chunks of k tokens with d features, c of them in each sequence; r rows of a span. Features are only ever a
loop, so any width goes.
"""

import triton
import triton.language as tl


@triton.jit
def _row_of(rows, names, chunks, stride_b, stride_c, stride_k, length, width, row, chunk):
    """Where a row begins, its token's number, and how many of its features may be read: 0 where it is not usable."""
    token = chunk.to(tl.int64) * length + row
    at = rows + (chunk // chunks).to(tl.int64) * stride_b + (chunk % chunks).to(tl.int64) * stride_c
    return at + row.to(tl.int64) * stride_k, token, tl.where(tl.load(names + token) >= 0, width, 0)


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
