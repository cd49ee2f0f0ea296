# SPDX-License-Identifier: Apache-2.0
"""SimReg as a ratio of two sums that never needs all pairs at once: the maths that every fast form shares.

With P_ij = exp((cos(e_i, e_j) - 1) / tau) and the token itself among its positives, S_pos lies in [1, k]: the shift by
1 / tau needs no maximum, and one exponential serves row i and row j. The term is log1p(S_neg / S_pos), never a
difference of two large logarithms.

The gradient is one symmetric matrix times the unit rows: with u = S_neg / S_pos and g the gradient that reaches u,

    a_i = g_i / (tau S_pos_i),  b_i = a_i u_i,  H_ij = P_ij (a_i + a_j) for other labels, -P_ij (b_i + b_j) for equal,

and dL/de_i = (h_i - <h_i, e^_i> e^_i) / |e_i| with h = H e^. Tokens that are no anchors have a = b = 0. Kept between
forward and backward beside the embeddings: four numbers a token, and P itself where it is small; else P is computed
again. How the pairs are gone through is told in `walk`.

Shapes: b sequences of c chunks of k tokens with d features; p anchors of each chunk.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from simreg_megatron.kernels import tiled as _tiled  # noqa: F401  (puts its form into FORMS)
from simreg_megatron.kernels import walk
from simreg_megatron.kernels.precision import full_float32
from simreg_megatron.kernels.walk import FORMS, Form, Given, Span, shared_sums

MODULES = {
    "tiled": "simreg_megatron.kernels.tiled",
    "gemm": "simreg_megatron.kernels.gemm",
    "triton": "simreg_megatron.kernels.fused",
}
"""Module by the name of the `impl`. Those with Triton are imported where they are first used, as not every machine has
it; the other one is here from the start, as torch.compile traces no import."""


def form_named(impl: str) -> Form:
    """ValueError where it needs a Triton that is not here."""
    if impl not in FORMS:
        try:
            importlib.import_module(MODULES[impl])
        except ModuleNotFoundError as error:
            raise ValueError(f"impl {impl} needs {error.name}, which is not installed: use tiled") from error
    return FORMS[impl]


class Tokens(NamedTuple):
    """What the pairs are made of."""

    rows: Tensor  # [b, c, k, d], of any strides; those that are not usable may hold anything
    labels: Tensor  # [b, c, k] integer
    usable: Tensor  # [b, c, k] bool
    documents: Tensor | None  # [b, c, k]; tokens of different documents never meet


def kept_bytes(tokens: Tokens, anchors: Span, impl: str) -> int:
    """What exponentials would take that stay until the backward; 0 where they are better computed again."""
    scale = tokens.rows.new_empty(0, dtype=torch.promote_types(tokens.rows.dtype, torch.float32))
    return walk.kept_bytes(form_named(impl).tiles, Given(tokens.rows, tokens.labels, scale, tokens.documents), anchors)


def contrast_ratio(
    tokens: Tokens, *, anchors: Span, temperature: float, impl: str = "tiled", keep: bool = True
) -> Tensor:
    """u_i = sum_{j in N_i} P_ij / sum_{j in P_i} P_ij of the anchors, [b, c, p]; SimReg's term is log1p(u_i).

    Args:
        tokens: float16, bfloat16, float32 or float64 rows; half precision is multiplied as it is and summed in
            float32, its norms applied afterwards.
        anchors: first and last (not included) position with a ratio; the gradient reaches all rows.
        temperature: tau, above 0.
        impl: a key of MODULES.
        keep: False where the budget for exponentials is spent on other calls.

    Returns:
        float32 (float64 for float64). 0 for an anchor without negatives and for one that is not usable.
    """
    return _ContrastRatio.apply(*tokens, anchors, temperature, impl, keep)


class Kept(NamedTuple):
    """What the gradient needs beside the rows."""

    documents: Tensor | None  # [b, c, k], or None
    names: Tensor  # [b, c, k]
    scale: Tensor  # [b, c, k]
    total: Tensor  # S_pos [b, c, p]
    ratio: Tensor  # S_neg / S_pos [b, c, p]
    pairs: Tensor  # P of tile after tile, flat; empty where it is computed again


def measure(tokens: Tokens, anchors: Span, temperature: float, impl: str, *, keep: bool) -> Kept:
    """The forward pass, outside autograd; `keep` for a gradient to come."""
    form = form_named(impl)
    names = token_names(tokens.labels, tokens.usable, as_labels=form.tiles.compares_labels)
    return Kept(
        tokens.documents,
        names,
        *form.anchor_sums(tokens.rows, names, tokens.documents, *anchors, temperature, keep),
    )


def measure_part(
    tokens: Tokens, anchors: Span, rectangles: Sequence[tuple[Span, Span]], temperature: float, impl: str
) -> tuple[Given, Tensor]:
    """As `walk.shared_sums`, for those who share the pairs of a chunk; `finish` once all parts are added up."""
    tiles = form_named(impl).tiles
    names = token_names(tokens.labels, tokens.usable, as_labels=tiles.compares_labels)
    given = Given(tokens.rows, names, tiles.inverse_norms(tokens.rows, names), tokens.documents)
    with full_float32():
        return given, shared_sums(tiles, given, anchors, rectangles, temperature)


def finish(given: Given, sums: Tensor, anchors: Span, impl: str) -> Kept:
    """What `measure` returns, from the sums [2, b, c, p] over all tokens that the anchors meet."""
    own = slice(*anchors)
    ratios = form_named(impl).tiles.ratio_of(sums, given.names[..., own], given.scale[..., own])
    return Kept(given.documents, given.names, given.scale, *ratios, given.rows.new_empty(0))


def pull_back(
    rows: Tensor, kept: Kept, pull: Tensor, anchors: Span, reach: Span, temperature: float, impl: str, grad: Tensor
) -> None:
    """The backward pass, into `grad`: see `walk.pair_gradient`."""
    given = rows, kept.names, kept.scale, kept.documents
    form_named(impl).pair_gradient(*given, kept.pairs, pull, *anchors, *reach, temperature, grad)


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
        impl: str,
        keep: bool,
    ) -> Tensor:
        tokens = Tokens(rows, labels, usable, documents)
        kept = measure(tokens, anchors, temperature, impl, keep=keep and ctx.needs_input_grad[0])
        ctx.save_for_backward(rows, *kept)
        ctx.options = anchors, temperature, impl
        return kept.ratio

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, *saved = ctx.saved_tensors
        kept = Kept(*saved)
        anchors, temperature, impl = ctx.options
        pull = torch.zeros(2, *kept.names.shape, dtype=kept.scale.dtype, device=rows.device)  # of no anchor: 0
        pull[..., slice(*anchors)] = anchor_pull(grads[0], kept, temperature, impl)
        grad = torch.empty_like(rows, memory_format=torch.contiguous_format)
        pull_back(rows, kept, pull, anchors, (0, rows.shape[2]), temperature, impl, grad)
        return grad, None, None, None, None, None, None, None


def anchor_pull(grad_ratio: Tensor, kept: Kept, temperature: float, impl: str) -> Tensor:
    """(a, b) of the anchors, [2, b, c, p]: how strongly each pulls at its negatives and at its positives."""
    return form_named(impl).tiles.anchor_pull(grad_ratio, kept.total, kept.ratio, temperature)


def token_names(labels: Tensor, usable: Tensor, *, as_labels: bool = False) -> Tensor:
    """Labels [..., k] as small numbers, equal where labels are, exact in float32; -1 for tokens not usable.

    Args:
        as_labels: the labels themselves will do, which needs no sort.
    """
    signed = labels if labels.dtype.is_signed else labels.long()  # bytes of a text would make 255 of -1
    known = torch.where(usable, signed, -1).contiguous()
    if as_labels:
        return known
    ranks = torch.searchsorted(known.sort(dim=-1).values, known)
    return ranks.float().masked_fill_(~usable, -1.0)
