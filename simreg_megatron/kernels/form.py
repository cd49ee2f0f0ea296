# SPDX-License-Identifier: Apache-2.0
"""The interface of the fast forms of SimReg.

Shapes: b sequences of c chunks of k tokens with d features; p anchors of each chunk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

Span = tuple[int, int]  # first position and one past the last
Rectangles = Sequence[tuple[Span, Span]] | None

FORMS = ("triton", "tiled")
"""Names of the fast forms, by which `impl` chooses; `contrast.form_named` has the forms."""


class Tokens(NamedTuple):
    """The tokens whose pairs are compared."""

    rows: Tensor  # [b, c, k, d], of any strides
    labels: Tensor  # [b, c, k] integer
    usable: Tensor  # [b, c, k] bool
    documents: Tensor | None  # [b, c, k]; tokens of different documents never meet


class Kept(NamedTuple):
    """Tensors that the gradient needs in addition to the rows and the pull of each token."""

    documents: Tensor | None  # [b, c, k], or None
    names: Tensor  # [b, c, k]: equal where labels are, -1 where not usable
    scale: Tensor  # 1 / |row| times a constant of the form [b, c, k]
    pairs: Tensor  # P of all pairs, in an order of the form's own; empty where it is computed again


class Measured(NamedTuple):
    """Results of the forward for the anchors."""

    terms: Tensor  # log(1 + S_neg / S_pos) [b, c, p]; 0 where there are no negatives, or the token is not usable
    slopes: Tensor  # (a, b) of `contrast` for a gradient of 1, [2, b, c, p]: times the gradient they are the pull
    kept: Kept


class Form(ABC):
    """Interface: the sums over pairs and their gradient; see `contrast` for the equations."""

    @abstractmethod
    def pair_sums(
        self, tokens: Tokens, anchors: Span, temperature: float, rectangles: Rectangles = None, *, keep: bool = False
    ) -> tuple[Kept, Tensor]:
        """Sum P over the positives and over the negatives of the anchors; `finish` follows.

        Args:
            rectangles: for ranks that share the pairs of a chunk, those computed here, in addition to the pairs of two
                anchors: each of a token in the first span with one in the second, which share no token. None: all pairs
                of the anchors.
            keep: P for a gradient to come, where it is small.

        Returns:
            `Kept`, and the sums [2, b, c, p], float64 or in parts [2, b, c, parts, p] that `finish` adds up. With
            rectangles [2, b, c, k], float64: each pair is added to both of its tokens.
        """

    @abstractmethod
    def finish(self, part: Kept, sums: Tensor, anchors: Span, temperature: float) -> Measured:
        """Compute the anchors' terms from their sums over all tokens that they meet."""

    def measure(self, tokens: Tokens, anchors: Span, temperature: float, *, keep: bool) -> Measured:
        """Compute the anchors' terms where all pairs are computed here."""
        part, sums = self.pair_sums(tokens, anchors, temperature, keep=keep)
        return self.finish(part, sums, anchors, temperature)

    @abstractmethod
    def pull_back(
        self, rows: Tensor, kept: Kept, pull: Tensor, anchors: Span, temperature: float, grad: Tensor
    ) -> None:
        """Write the gradient of the anchors' rows into `grad` [b, c, p, d]. It may write over `kept.pairs`.

        Args:
            pull: (a, b) of all tokens, [2, b, c, k]; tokens that are anchors on other ranks have theirs, too.
        """

    @abstractmethod
    def keeps(self, rows: Tensor, num_pairs: int, chunk: int) -> bool:
        """Return whether the exponentials of `num_pairs` pairs, in chunks of `chunk` tokens, stay for the backward.

        Args:
            rows: [..., d] of the type and device of the rows.
        """


def cut(span: Span, size: int) -> list[Span]:
    """Cut a span into spans of at most `size`."""
    return [(first, min(first + size, span[1])) for first in range(span[0], span[1], size)]
