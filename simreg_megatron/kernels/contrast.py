# SPDX-License-Identifier: Apache-2.0
"""SimReg as a ratio of two sums that never needs all pairs at once: the maths that the fast implementations share.

With P_ij = exp((cos(e_i, e_j) - 1) / tau) and the token itself among its positives, S_pos lies in [1, k]: the shift by
1 / tau needs no maximum, and one exponential serves row i and row j. The term is log1p(S_neg / S_pos), never a
difference of two large logarithms.

The gradient is one symmetric matrix times the unit rows: with u = S_neg / S_pos, and g the gradient of the term,

    a_i = g_i / ((1 + u_i) tau S_pos_i),  b_i = a_i u_i,
    H_ij = P_ij (a_i + a_j) for other labels, -P_ij (b_i + b_j) for equal ones,

and dL/de_i = (h_i - <h_i, e^_i> e^_i) / |e_i| with h = H e^. Between forward and backward four numbers a token stay in
addition to the embeddings, and P itself where it is small; else P is computed again.

Shapes: b sequences of c chunks of k tokens with d features; p anchors of each chunk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Span = tuple[int, int]  # first position and one past the last
Rectangles = Sequence[tuple[Span, Span]] | None


class Tokens(NamedTuple):
    """The tokens whose pairs are compared."""

    rows: Tensor  # [b, c, k, d], of any strides
    labels: Tensor  # [b, c, k] integer
    usable: Tensor  # [b, c, k] bool
    documents: Tensor | None  # [b, c, k]; tokens of different documents never meet


class Saved(NamedTuple):
    """Tensors that the gradient needs in addition to the rows and the coefficients of each token."""

    documents: Tensor | None  # [b, c, k], or None
    label_ids: Tensor  # [b, c, k]: equal where labels are, -1 where not usable
    scale: Tensor  # 1 / |row| times a constant of the kernels [b, c, k]
    pairs: Tensor  # P of all pairs, in the kernels' own order; empty where it is computed again


class ForwardResult(NamedTuple):
    """Results of the forward for the anchors."""

    terms: Tensor  # log(1 + S_neg / S_pos) [b, c, p]; 0 where there are no negatives, or the token is not usable
    slopes: Tensor  # (a, b) for a gradient of 1, [2, b, c, p]: times the gradient of the term they are the coeffs
    saved: Saved


class Kernels(ABC):
    """Interface: the sums over pairs and their gradient; see above for the equations."""

    @abstractmethod
    def pair_sums(
        self, tokens: Tokens, anchors: Span, temperature: float, rectangles: Rectangles = None, *, save: bool = False
    ) -> tuple[Saved, Tensor]:
        """Sum P over the positives and over the negatives of the anchors; `finish` follows.

        Args:
            rectangles: for ranks that share a chunk's pairs: (span, span) without a common token. The pairs between the
                two are computed here, in addition to the pairs of two anchors. None: all pairs of the anchors.
            save: whether to save P for the backward, if it is small.

        Returns:
            `Saved`, and the sums [2, b, c, p], float64 or in parts [2, b, c, parts, p] that `finish` adds up. With
            rectangles [2, b, c, k], float64: each pair is added to both of its tokens.
        """

    @abstractmethod
    def finish(self, saved: Saved, sums: Tensor, anchors: Span, temperature: float) -> ForwardResult:
        """Compute the anchors' terms from their sums over all tokens that they meet."""

    def forward(self, tokens: Tokens, anchors: Span, temperature: float, *, save: bool) -> ForwardResult:
        """Compute the anchors' terms where all pairs are computed here."""
        saved, sums = self.pair_sums(tokens, anchors, temperature, save=save)
        return self.finish(saved, sums, anchors, temperature)

    @abstractmethod
    def backward(
        self, rows: Tensor, saved: Saved, coeffs: Tensor, anchors: Span, temperature: float, grad: Tensor
    ) -> None:
        """Write the gradient of the anchors' rows into `grad` [b, c, p, d]. It may write over `saved.pairs`.

        `coeffs` are (a, b) of all tokens, [2, b, c, k]: those that are anchors on other ranks have theirs, too.
        """

    @abstractmethod
    def saves_pairs(self, rows: Tensor, num_pairs: int, chunk: int) -> bool:
        """Return whether P of `num_pairs` pairs, in chunks of `chunk` tokens like `rows`, stays for the backward."""


def cut(span: Span, size: int) -> list[Span]:
    """Cut a span into spans of at most `size`."""
    return [(first, min(first + size, span[1])) for first in range(span[0], span[1], size)]


def contrast_terms(tokens: Tokens, temperature: float, kernels: Kernels) -> Tensor:
    """Compute log(1 + u_i) of every token [b, c, k], u_i = sum_{j in N_i} P_ij / sum_{j in P_i} P_ij.

    Args:
        tokens: float16, bfloat16, float32 or float64 rows; half precision is summed in float32, and never normalised
            in its own type.
        temperature: tau, above 0.

    Returns:
        float32 (float64 for float64). 0 for a token without negatives and for one that is not usable.
    """
    compute = _ContrastTerms.apply
    if torch.compiler.is_compiling():
        compute = torch.compiler.disable(compute)  # its tiles stay out of the graph
    return compute(*tokens, temperature, kernels)


class _ContrastTerms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, labels: Tensor, usable: Tensor, documents: Any, temperature: float, kernels: Kernels
    ) -> Tensor:
        tokens, anchors = Tokens(rows, labels, usable, documents), (0, rows.shape[2])
        terms, slopes, saved = kernels.forward(tokens, anchors, temperature, save=ctx.needs_input_grad[0])
        ctx.save_for_backward(rows, slopes, *saved)
        ctx.options, ctx.is_spent = (temperature, kernels), False
        return terms

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, slopes, *tensors = ctx.saved_tensors
        (temperature, kernels), (saved,) = ctx.options, without_spent_pairs(ctx, [Saved(*tensors)])
        grad = torch.empty_like(rows, memory_format=torch.contiguous_format)
        kernels.backward(rows, saved, grads[0] * slopes, (0, rows.shape[2]), temperature, grad)
        return grad, None, None, None, None, None


def without_spent_pairs(ctx: Any, saved: list[Saved]) -> list[Saved]:
    """Drop exponentials that a first backward (`retain_graph`) may have written over; refuse a second derivative."""
    if torch.is_grad_enabled():  # create_graph=True
        raise RuntimeError("the fast implementations of SimReg have no second derivative: use impl 'reference'")
    if ctx.is_spent:
        saved = [each._replace(pairs=each.pairs.new_empty(0)) for each in saved]
    ctx.is_spent = True
    return saved
