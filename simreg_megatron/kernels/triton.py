# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""SimReg in Triton, for bfloat16 and float32 rows: three kernels compute the pairs, and two small ones the tokens.

    _pairs     P_ij = exp((cos_ij - 1) / tau), its sums over rows and columns, and P itself where it is kept; or W and r
    _weights   W_ij = H_ij / (|e_i| |e_j|), written over P, and r_i = sum_j W_ij <e_i, e_j> / |e_i|^2
    _product   dL/de_i = sum_j W_ij e_j - r_i e_i

H is that of `contrast`. r_i projects the gradient onto the tangent of the sphere at e_i and is known before the
product, whose epilogue applies it. A square of pairs is symmetric: the forward computes only tiles on and above its
diagonal, and stores them on both sides. P and W are bfloat16 for bfloat16 rows. Sums of tiles are stored one by one and
added in a fixed order: the same bits every time.

Chunks of up to LONGEST_KEPT tokens keep P for the backward, whose `_weights` finds cos_ij from it. In longer ones the
backward computes the pairs again, PANEL rows at a time, and `_pairs` goes on to W at once. Either way it takes at most
16 KiB a token in bfloat16, a twelfth of the logits of 32,000 tokens that Megatron holds at the same time.

A row that is not usable has weight 0 in every product, so it must be finite where Megatron's own loss is to be finite.

Shapes: m = b * c chunks of n tokens with d features, c of them in each sequence; rectangles of R rows and C columns.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from simreg_megatron.kernels.contrast import ForwardResult, Kernels, Rectangles, Saved, Span, Tokens, cut

LONGEST_KEPT = 8192
PANEL = 8192  # half as many leave half of a GPU idle in the product at width 512
PAIRS = {
    "bf16, sm_90": {"SIDE": 128, "BK": 64, "PER_SM": 2, "num_warps": 4, "num_stages": 3},
    "bf16": {"SIDE": 128, "BK": 64, "PER_SM": 1, "num_warps": 8, "num_stages": 3},
    "fp32": {"SIDE": 64, "BK": 32, "PER_SM": 4, "num_warps": 4, "num_stages": 3},
}
"""Tile of `_pairs`: SIDE x SIDE pairs, BK features at a time, PER_SM programs on a multiprocessor.

Those of sm_90 were chosen by measurement. Its backward takes that of "bf16": four warps have too few registers."""
PRODUCT = {
    "bf16, sm_90": {"BM": 128, "BN": 256, "BK": 64, "PER_SM": 1, "num_warps": 8, "num_stages": 3},
    "bf16": {"BM": 128, "BN": 128, "BK": 64, "PER_SM": 1, "num_warps": 8, "num_stages": 3},
    "fp32": {"BM": 64, "BN": 64, "BK": 32, "PER_SM": 4, "num_warps": 4, "num_stages": 3},
}
"""Tile of `_product`: BM rows, BN features, BK tokens at a time."""
WEIGHTS = {"ROWS": 16, "COLUMNS": 256, "num_warps": 4}
_TOKENS = 512  # that a program of `_terms` takes
NORMS = {"TOKENS": 8, "FEATURES": 256, "num_warps": 2}
"""Tile of `_ids_and_norms`: rows of a program, and features of a row at a time."""


@triton.jit
def _ids_and_norms(
    rows, labels, usable, chunks, stride_b, stride_c, stride_k, length, width, num_tokens, label_ids, scale,
    TOKENS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Write label and 1 / |e| of each token; -1 and 1 if it is not usable or exactly zero."""
    token, features = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, FEATURES)
    inside, chunk = token < num_tokens, token // length
    at = rows + (chunk // chunks).to(tl.int64) * stride_b + (chunk % chunks).to(tl.int64) * stride_c
    at += (token % length).to(tl.int64) * stride_k
    squares = tl.zeros((TOKENS, FEATURES), tl.float64)  # of float32: neither too large nor too small, rounded once
    for start in range(0, width, FEATURES):
        mask = inside[:, None] & (features + start < width)[None, :]
        numbers = tl.load(at[:, None] + (features + start)[None, :], mask, 0.0).to(tl.float64)
        squares += numbers * numbers
    square = tl.sum(squares, axis=1)
    is_usable = (tl.load(usable + token, inside, 0) != 0) & (square != 0.0)  # a NaN counts, as any number but 0
    tl.store(scale + token, tl.where(is_usable, 1.0 / tl.sqrt(square), 1.0).to(tl.float32), inside)
    tl.store(label_ids + token, tl.where(is_usable, tl.load(labels + token, inside, 0).to(tl.int32), -1), inside)


@triton.jit
def _column_of(tile, guess):
    """Find column j of the tiles j (j + 1) / 2 ... on and above a diagonal, from a guess that is off by one at most."""
    guess -= (guess * (guess + 1) // 2 > tile).to(tl.int32)
    return guess + ((guess + 1) * (guess + 2) // 2 <= tile).to(tl.int32)


@triton.jit
def _weights_of(exponentials, same, a_i, a_j, b_i, b_j, scale_i, scale_j):
    """Compute W from P."""
    factors = tl.where(same, -(b_i[:, None] + b_j[None, :]), a_i[:, None] + a_j[None, :]) * exponentials
    return factors * scale_i[:, None] * scale_j[None, :]


@triton.jit
def _pairs(
    rows, chunks, stride_b, stride_c, stride_k, num_chunks, length, width, label_ids, scale, documents,
    first_i, last_i, first_j, last_j, to_exponent, coeffs, of_rows, of_columns, pairs, pitch,
    UPPER: tl.constexpr, BACKWARD: tl.constexpr, KEEP: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr, SMS: tl.constexpr, PER_SM: tl.constexpr, SIDE: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Write P of a rectangle to pairs [m, R, pitch], its sums over positives and negatives to of_rows [2, m, tiles of
    columns, R] and of_columns [2, m, tiles of rows, C].

    UPPER: the rectangle is a square, of_rows and of_columns are the same, and each tile also fills its mirror image.
    BACKWARD: W to pairs instead, and r to of_rows [m, tiles of columns, R].
    """
    tiles_i, tiles_j = tl.cdiv(last_i - first_i, SIDE), tl.cdiv(last_j - first_j, SIDE)
    height, breadth = last_i - first_i, last_j - first_j
    tiles = tiles_i * (tiles_i + 1) // 2 if UPPER else tiles_i * tiles_j
    side = tl.arange(0, SIDE)
    tokens = tl.make_tensor_descriptor(
        rows, [num_chunks // chunks, chunks, length, width], [stride_b, stride_c, stride_k, 1], [1, 1, SIDE, BK]
    )
    for work in tl.range(tl.program_id(0), num_chunks * tiles, SMS * PER_SM):
        chunk, tile = work // tiles, work % tiles
        if UPPER:
            tile_j = _column_of(tile, ((tl.sqrt((8 * tile + 1).to(tl.float32)) - 1.0) * 0.5).to(tl.int32))
            tile_i = tile - tile_j * (tile_j + 1) // 2
        else:
            tile_i, tile_j = tile % tiles_i, tile // tiles_i
        b, c = chunk // chunks, chunk % chunks
        products = tl.zeros((SIDE, SIDE), tl.float32)
        for start in range(0, width, BK):
            left = tokens.load([b, c, first_i + tile_i * SIDE, start]).reshape(SIDE, BK)
            right = tokens.load([b, c, first_j + tile_j * SIDE, start]).reshape(SIDE, BK)
            if WIDEN:  # Triton's interpreter multiplies the bits of bfloat16
                left, right = left.to(tl.float32), right.to(tl.float32)
            products = tl.dot(left, right.T, products, input_precision=PRECISION)
        i, j = tile_i * SIDE + side, tile_j * SIDE + side
        at_i, at_j = chunk * length + first_i + i, chunk * length + first_j + j
        in_i, in_j = i < height, j < breadth
        label_i, label_j = tl.load(label_ids + at_i, in_i, -1), tl.load(label_ids + at_j, in_j, -1)
        scale_i, scale_j = tl.load(scale + at_i, in_i, 0.0), tl.load(scale + at_j, in_j, 0.0)
        meet = (first_i + i)[:, None] != (first_j + j)[None, :]
        if HAS_DOCUMENTS:
            document_i = tl.where(label_i >= 0, tl.load(documents + at_i, in_i, 0), -1)
            document_j = tl.where(label_j >= 0, tl.load(documents + at_j, in_j, 0), -2)
            meet = meet & (document_i[:, None] == document_j[None, :])
        else:
            meet = meet & (label_i >= 0)[:, None] & (label_j >= 0)[None, :]
        exponentials = tl.exp2((products * scale_i[:, None] * scale_j[None, :] - 1.0) * to_exponent)
        exponentials = tl.where(meet, exponentials, 0.0)
        same = label_i[:, None] == label_j[None, :]
        if BACKWARD:
            to_b = num_chunks * length
            a_i, a_j = tl.load(coeffs + at_i, in_i, 0.0), tl.load(coeffs + at_j, in_j, 0.0)
            b_i, b_j = tl.load(coeffs + to_b + at_i, in_i, 0.0), tl.load(coeffs + to_b + at_j, in_j, 0.0)
            stored = _weights_of(exponentials, same, a_i, a_j, b_i, b_j, scale_i, scale_j).to(pairs.dtype.element_ty)
            radial_sum = tl.sum(stored.to(tl.float32) * tl.where(meet, products, 0.0), axis=1) * scale_i * scale_i
            tl.store(of_rows + (chunk.to(tl.int64) * tiles_j + tile_j) * height + i, radial_sum, in_i)
        else:
            stored = exponentials.to(pairs.dtype.element_ty)
            positive = tl.where(same, exponentials, 0.0)
            negative = exponentials - positive  # exact: one of the two is 0
            shift = height.to(tl.int64) * num_chunks * tiles_j
            to = of_rows + (chunk.to(tl.int64) * tiles_j + tile_j) * height + i
            tl.store(to, tl.sum(positive, axis=1), in_i)
            tl.store(to + shift, tl.sum(negative, axis=1), in_i)
            if UPPER:
                in_j = in_j & (j >= (tile_i + 1) * SIDE)  # on the diagonal the rows have counted both sides
            shift = breadth.to(tl.int64) * num_chunks * tiles_i
            to = of_columns + (chunk.to(tl.int64) * tiles_i + tile_i) * breadth + j
            tl.store(to, tl.sum(positive, axis=0), in_j)
            tl.store(to + shift, tl.sum(negative, axis=0), in_j)
        if KEEP:
            to = pairs + chunk.to(tl.int64) * height * pitch
            tl.store(to + i[:, None].to(tl.int64) * pitch + j[None, :], stored, in_i[:, None] & (j < breadth)[None, :])
            if UPPER:
                tl.store(to + j[:, None].to(tl.int64) * pitch + i[None, :], stored.T, in_j[:, None] & in_i[None, :])


@triton.jit
def _terms(sums, shift, tiles, height, label_ids, scale, length, first, temperature, terms, slopes, SIZE: tl.constexpr):
    """Compute log(1 + u) [m, R], and (a, b) for a gradient of 1 [2, m, R], from sums [2, m, tiles, R] over all other
    tokens; 0 where not usable."""
    blocks = tl.cdiv(height, SIZE)
    chunk, i = tl.program_id(0) // blocks, tl.program_id(0) % blocks * SIZE + tl.arange(0, SIZE)
    inside = i < height
    at = sums + chunk.to(tl.int64) * tiles * height + i
    positive, negative = tl.zeros((SIZE,), tl.float64), tl.zeros((SIZE,), tl.float64)
    for _ in range(tiles):
        positive += tl.load(at, inside, 0.0).to(tl.float64)
        negative += tl.load(at + shift, inside, 0.0).to(tl.float64)
        at += height
    positives, token = positive + 1.0, chunk * length + first + i  # the token itself is a positive
    inverse = tl.load(scale + token, inside, 1.0)
    # NaN for a row that is not finite, whose scale is NaN or 0: without pairs it would pass as a 0.
    doubt = tl.where(inverse == 0.0, float("nan"), inverse * 0.0)
    u = tl.where(tl.load(label_ids + token, inside, -1) >= 0, negative / positives + doubt, 0.0)
    rounded = 1.0 + u  # log(1 + u) = log(rounded) u / (rounded - 1), also where the sum lost digits of u
    term = tl.where(rounded == 1.0, u, tl.log(rounded) * (u / (rounded - 1.0)))
    a = tl.where(u == 0.0, 0.0, 1.0 / (rounded * positives * temperature))
    at, to_b = chunk * height + i, tl.num_programs(0) // blocks * height
    tl.store(terms + at, term.to(tl.float32), inside)
    tl.store(slopes + at, a.to(tl.float32), inside)
    tl.store(slopes + to_b + at, (a * u).to(tl.float32), inside)


@triton.jit
def _log2(x, IS_FAST: tl.constexpr):
    """Compute log2(x) to 2^-22. tl.log2 is exact to the last bit, which costs `_weights` a quarter of its time."""
    return libdevice.fast_log2f(x) if IS_FAST else tl.log2(x)


@triton.jit
def _weights(
    pairs, pitch, num_chunks, length, label_ids, scale, coeffs, first, height, to_cosine, radial,
    IS_FAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write W over P, in pairs [m, R, pitch], and r [m, R]."""
    blocks = tl.cdiv(height, ROWS)
    chunk, i = tl.program_id(0) // blocks, tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    in_i, at_i = i < height, chunk * length + first + i
    to_b = num_chunks * length
    scale_i, label_i = tl.load(scale + at_i, in_i, 0.0), tl.load(label_ids + at_i, in_i, -1)
    a_i, b_i = tl.load(coeffs + at_i, in_i, 0.0), tl.load(coeffs + to_b + at_i, in_i, 0.0)
    place = pairs + chunk.to(tl.int64) * height * pitch + i[:, None].to(tl.int64) * pitch
    radial_sum = tl.zeros((ROWS,), tl.float32)
    for start in range(0, length, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        in_j, at_j = j < length, chunk * length + j
        scale_j, label_j = tl.load(scale + at_j, in_j, 1.0), tl.load(label_ids + at_j, in_j, -1)
        a_j, b_j = tl.load(coeffs + at_j, in_j, 0.0), tl.load(coeffs + to_b + at_j, in_j, 0.0)
        inside = in_i[:, None] & in_j[None, :]
        exponentials = tl.load(place + j[None, :], inside, 0.0).to(tl.float32)
        same = label_i[:, None] == label_j[None, :]
        weights = _weights_of(exponentials, same, a_i, a_j, b_i, b_j, scale_i, scale_j).to(pairs.dtype.element_ty)
        tl.store(place + j[None, :], weights, inside)
        cosines = 1.0 + to_cosine * _log2(tl.maximum(exponentials, 1e-37), IS_FAST)
        radial_sum += tl.sum(weights.to(tl.float32) * cosines / scale_j[None, :], axis=1)
    tl.store(radial + chunk * height + i, radial_sum * scale_i, in_i)


@triton.jit
def _product(
    weights, pitch, num_chunks, height, first, rows, chunks, stride_b, stride_c, stride_k, length, width, radial,
    grad, grad_b, grad_c, grad_k,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr, SMS: tl.constexpr, PER_SM: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute W e - r e of R rows, from weights [m, R, pitch] with all n tokens of their chunks."""
    down, across = tl.cdiv(height, BM), tl.cdiv(width, BN)
    lefts = tl.make_tensor_descriptor(
        weights, [num_chunks, height, length], [pitch.to(tl.int64) * height, pitch, 1], [1, BM, BK]
    )
    rights = tl.make_tensor_descriptor(
        rows, [num_chunks // chunks, chunks, length, width], [stride_b, stride_c, stride_k, 1], [1, 1, BK, BN]
    )
    for work in tl.range(tl.program_id(0), num_chunks * down * across, SMS * PER_SM, flatten=True):
        chunk, tile = work // (down * across), work % (down * across)
        row, feature = tile % down * BM, tile // down * BN
        b, c = chunk // chunks, chunk % chunks
        products = tl.zeros((BM, BN), tl.float32)
        for start in range(0, length, BK):
            left = lefts.load([chunk, row, start]).reshape(BM, BK)
            right = rights.load([b, c, start, feature]).reshape(BK, BN)
            if WIDEN:
                left, right = left.to(tl.float32), right.to(tl.float32)
            products = tl.dot(left, right, products, input_precision=PRECISION)
        # Pointers: descriptors would need shared memory that prefetches the next tile.
        i, j = row + tl.arange(0, BM), feature + tl.arange(0, BN)
        inside = (i < height)[:, None] & (j < width)[None, :]
        at = rows + b.to(tl.int64) * stride_b + c.to(tl.int64) * stride_c
        at += (first + i)[:, None].to(tl.int64) * stride_k + j[None, :]
        radial_i = tl.load(radial + chunk * height + i, i < height, 0.0)
        products -= radial_i[:, None] * tl.load(at, inside, 0.0).to(tl.float32)
        to = grad + b.to(tl.int64) * grad_b + c.to(tl.int64) * grad_c + i[:, None].to(tl.int64) * grad_k + j[None, :]
        tl.store(to, products.to(grad.dtype.element_ty), inside)


INTERPRETS = not isinstance(_pairs, triton.runtime.JITFunction)
"""Whether Triton runs its kernels in Python, on the CPU: TRITON_INTERPRET=1 in the environment when it is imported."""


def run(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch on the device of the first argument; Triton itself takes the current one.

    Triton takes the memory of descriptors from an allocator of the context, and autograd's threads have contexts of
    their own: so it is set in each launch, in a copy of the context, which leaves the program's own alone.
    """

    context = contextvars.copy_context()
    with torch.cuda.device_of(arguments[0]) if arguments[0].is_cuda else contextlib.nullcontext():
        context.run(triton.set_allocator, lambda size, *_: torch.empty(size, dtype=torch.int8, device="cuda"))
        context.run(kernel[grid], *arguments, enable_fp_fusion=True, **constants)  # Triton 3.10 changes the default


def cdiv(count: int, size: int) -> int:
    return -(-count // size)  # triton.cdiv costs the host 10 us a call


class TritonKernels(Kernels):
    """Launches the kernels above; a ValueError where Triton is too old for them."""

    def __init__(self) -> None:
        if not hasattr(tl, "make_tensor_descriptor"):
            raise ValueError(f"impl 'triton' needs Triton 3.4 or newer, got {triton.__version__}: use impl 'tiled'.")

    def pair_sums(
        self, tokens: Tokens, anchors: Span, temperature: float, rectangles: Rectangles = None, *, save: bool = False
    ) -> tuple[Saved, Tensor]:
        rows, saved = _prepared(tokens)
        (first, last), length = anchors, rows.shape[2]
        if rectangles is None and length <= LONGEST_KEPT and rows.numel():
            pairs = _room_for_pairs(rows, last - first) if save else saved.pairs
            sums, _ = _run_pairs(rows, saved, anchors, (0, length), temperature, pairs)
            return saved._replace(pairs=pairs), sums
        others = [(anchors, (0, first)), (anchors, (last, length))] if rectangles is None else rectangles
        totals = saved.scale.new_zeros(2, *saved.label_ids.shape, dtype=torch.float64)
        panels = [(one, one) for one in cut(anchors, PANEL)]  # so that the sums of tiles stay few
        panels += [(one, (one[1], last)) for one in cut(anchors, PANEL)]
        panels += [(piece, other) for one, other in others for piece in cut(one, PANEL)]
        for one, other in panels:
            if one[0] < one[1] and other[0] < other[1] and rows.numel():
                of_rows, of_columns = _run_pairs(rows, saved, one, other, temperature, saved.pairs)
                totals[..., slice(*one)] += of_rows.sum(dim=3, dtype=torch.float64)
                if one != other:
                    totals[..., slice(*other)] += of_columns.sum(dim=3, dtype=torch.float64)
        return saved, totals[..., first:last] if rectangles is None else totals

    def finish(self, saved: Saved, sums: Tensor, anchors: Span, temperature: float) -> ForwardResult:
        sums = (sums if sums.dim() == 5 else sums.unsqueeze(3)).contiguous()  # [2, b, c, tiles, p]
        num_sequences, num_chunks, tiles, height = sums.shape[1:]
        terms = saved.scale.new_empty(num_sequences, num_chunks, height)
        slopes = saved.scale.new_empty(2, *terms.shape)
        if terms.numel():
            run(
                _terms, (num_sequences * num_chunks * cdiv(height, _TOKENS),),
                sums, sums[0].numel(), tiles, height, saved.label_ids, saved.scale, saved.label_ids.shape[2],
                anchors[0], temperature, terms, slopes, SIZE=_TOKENS,
            )  # fmt: skip
        return ForwardResult(terms, slopes, saved)

    def backward(
        self, rows: Tensor, saved: Saved, coeffs: Tensor, anchors: Span, temperature: float, grad: Tensor
    ) -> None:
        rows, num_chunks, length = _aligned(rows), rows.shape[0] * rows.shape[1], rows.shape[2]
        if not grad.numel():
            return
        is_saved, coeffs = saved.pairs.numel() > 0, coeffs.contiguous()
        panels = [anchors] if is_saved else cut(anchors, PANEL)
        room = saved.pairs if is_saved else _room_for_pairs(rows, panels[0][1] - panels[0][0])
        pitch, constants, tile = room.shape[2], _constants(rows), PRODUCT[_kind(rows)]
        for start, end in panels:
            height = end - start
            weights = room.view(-1)[: num_chunks * height * pitch].view(num_chunks, height, pitch)
            if is_saved:
                radial = saved.scale.new_empty(num_chunks, height)
                run(
                    _weights, (num_chunks * cdiv(height, WEIGHTS["ROWS"]),),
                    weights, pitch, num_chunks, length, saved.label_ids, saved.scale, coeffs, start, height,
                    math.log(2) * temperature, radial, IS_FAST=not INTERPRETS and torch.version.hip is None, **WEIGHTS,
                )  # fmt: skip
            else:
                of_tiles, _ = _run_pairs(rows, saved, (start, end), (0, length), temperature, weights, coeffs)
                radial = of_tiles.sum(dim=2)
            into = grad[:, :, start - anchors[0] : end - anchors[0]]
            tiles = num_chunks * cdiv(height, tile["BM"]) * cdiv(rows.shape[3], tile["BN"])
            run(
                _product, (min(tiles, constants["SMS"] * tile["PER_SM"]),),
                weights, pitch, num_chunks, height, start, rows, rows.shape[1], *rows.stride()[:3], *rows.shape[2:],
                radial, into, *into.stride()[:3], **constants, **tile,
            )  # fmt: skip

    def saves_pairs(self, rows: Tensor, num_pairs: int, chunk: int) -> bool:
        return chunk <= LONGEST_KEPT


def _prepared(tokens: Tokens) -> tuple[Tensor, Saved]:
    """Return rows as the kernels read them, and label ids and 1 / |e| [b, c, n]; ValueError for rows of other types."""
    rows, unit = tokens.rows, 16 // tokens.rows.itemsize
    is_supported = rows.dtype in (torch.bfloat16, torch.float32) and (rows.is_cuda or INTERPRETS)
    if not is_supported or rows.shape[3] % unit:
        raise ValueError(
            f"impl 'triton' computes bfloat16 and float32 on a CUDA device, of a width that is a multiple of {unit}, "
            f"not {rows.dtype} of width {rows.shape[3]} on {rows.device}: use impl 'tiled'."
        )
    rows, labels = _aligned(rows), tokens.labels
    label_ids = torch.empty(labels.shape, dtype=torch.int32, device=rows.device)
    scale = torch.empty(labels.shape, dtype=torch.float32, device=rows.device)
    if label_ids.numel():
        run(
            _ids_and_norms, (cdiv(label_ids.numel(), NORMS["TOKENS"]),),
            rows, labels.contiguous(), tokens.usable.contiguous(), rows.shape[1], *rows.stride()[:3], *rows.shape[2:],
            label_ids.numel(), label_ids, scale, **NORMS,
        )  # fmt: skip
    documents = None if tokens.documents is None else tokens.documents.int().contiguous()
    return rows, Saved(documents, label_ids, scale, scale.new_empty(0))


def _aligned(rows: Tensor) -> Tensor:
    """Return the rows as descriptors can read them: in whole units of 16 bytes, with contiguous features."""
    unit, (of_b, of_c, of_k, of_d) = 16 // rows.itemsize, rows.stride()
    if of_d == 1 and not (of_b % unit or of_c % unit or of_k % unit or rows.storage_offset() % unit):
        return rows
    return rows.contiguous()


def _run_pairs(
    rows: Tensor, saved: Saved, one: Span, other: Span, temperature: float, pairs: Tensor, coeffs: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run `_pairs`; return its sums [2, b, c, tiles, R] and [2, b, c, tiles, C], or with coeffs r [b, c, tiles, R]."""
    kind, constants, scale, documents = _kind(rows), _constants(rows), saved.scale, saved.documents
    tile = PAIRS[kind if coeffs is None else kind.removesuffix(", sm_90")]
    num_sequences, num_chunks, length, width = rows.shape
    height, breadth = one[1] - one[0], other[1] - other[0]
    tiles_i, tiles_j = cdiv(height, tile["SIDE"]), cdiv(breadth, tile["SIDE"])
    is_square = one == other and coeffs is None
    tiles = tiles_i * (tiles_i + 1) // 2 if is_square else tiles_i * tiles_j
    size = (num_sequences, num_chunks) if coeffs is not None else (2, num_sequences, num_chunks)
    of_rows = scale.new_empty(*size, tiles_j, height)
    of_columns = of_rows if is_square or coeffs is not None else scale.new_empty(*size, tiles_i, breadth)
    run(
        _pairs, (min(num_sequences * num_chunks * tiles, constants["SMS"] * tile["PER_SM"]),),
        rows, num_chunks, *rows.stride()[:3], num_sequences * num_chunks, length, width, saved.label_ids, scale,
        saved.label_ids if documents is None else documents, *one, *other, math.log2(math.e) / temperature,
        scale if coeffs is None else coeffs, of_rows, of_columns, pairs, pairs.shape[-1],
        UPPER=is_square, BACKWARD=coeffs is not None, KEEP=pairs.numel() > 0, HAS_DOCUMENTS=documents is not None,
        **constants, **tile,
    )  # fmt: skip
    return of_rows, of_columns


def _room_for_pairs(rows: Tensor, height: int) -> Tensor:
    """Reserve [m, height, pitch] in whole units of 16 bytes, as descriptors require."""
    return rows.new_empty(rows.shape[0] * rows.shape[1], height, cdiv(rows.shape[2], 8) * 8)


def _kind(rows: Tensor) -> str:
    """Return the key of PAIRS and PRODUCT."""
    if rows.dtype == torch.float32:
        return "fp32"
    of_b, of_c, of_k, _ = rows.stride()
    is_aligned = (of_b | of_c | of_k | rows.shape[3]) % 16 == 0  # else the epilogue of sm_90's tile needs more memory
    return "bf16, sm_90" if is_aligned and _gpu(rows.device)[1] == 9 else "bf16"


def _constants(rows: Tensor) -> dict[str, Any]:
    return {
        "PRECISION": "ieee" if INTERPRETS or rows.dtype == torch.bfloat16 else "tf32x3",
        "WIDEN": INTERPRETS and rows.dtype == torch.bfloat16,
        "SMS": _gpu(rows.device)[0],
    }


@functools.cache
def _gpu(device: torch.device) -> tuple[int, int]:
    """Return the number of multiprocessors and the major compute capability."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return (properties.multi_processor_count, properties.major) if properties else (8, 9)
