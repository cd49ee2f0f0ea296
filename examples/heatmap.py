# SPDX-License-Identifier: Apache-2.0
"""How alike the hidden states of one text are under several models: cosine heat-maps side by side.

    same  = mean of cos(h_i, h_j) over i != j with y_i = y_j,    other = the mean over y_i != y_j

The picture is that of Figure 1 of the SimReg paper (arXiv 2605.08809). A state stands for the token that comes next,
its label y: rows are named "token read -> next token", columns by the next token alone.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAMED_TOKENS = 24  # more could not be read


@dataclass(frozen=True)
class HiddenStates:
    """One text under one model: hidden [n, d], tokens [n], labels [n] (ids of the next tokens), text of the last."""

    name: str
    hidden: NDArray[np.float32]
    tokens: tuple[str, ...]
    labels: NDArray[np.int64]
    after: str = ""

    @property
    def cosine(self) -> NDArray[np.float64]:
        """C_ij = h_i . h_j / (|h_i| |h_j|), [n, n]."""
        hidden = self.hidden.astype(np.float64)
        units = hidden / np.maximum(np.linalg.norm(hidden, axis=1, keepdims=True), 1e-300)
        return units @ units.T

    @property
    def equal(self) -> NDArray[np.bool_]:
        """Pairs of the same label, without the diagonal, [n, n]."""
        return (self.labels[:, None] == self.labels[None, :]) & ~np.eye(len(self.labels), dtype=bool)


class MeanCosines(NamedTuple):
    """Over pairs of one label, of two labels, and over all pairs; NaN where there is no such pair."""

    same: float
    other: float
    both: float


def read_hidden_states(path: str | Path, name: str) -> HiddenStates:
    """Read what examples/probe.py wrote; nothing in it is unpickled."""
    with np.load(path, allow_pickle=False) as arrays:
        return HiddenStates(name, arrays["hidden"], tuple(map(str, arrays["tokens"])), arrays["labels"])


def mean_cosines(states: HiddenStates) -> MeanCosines:
    """Average the cosines of a text."""
    cosine, same = states.cosine, states.equal
    pairs = ~np.eye(len(cosine), dtype=bool)
    means = (float(cosine[chosen].mean()) if chosen.any() else float("nan") for chosen in (same, pairs & ~same, pairs))
    return MeanCosines(*means)


def excerpt(states: HiddenStates, length: int = _NAMED_TOKENS) -> HiddenStates:
    """Choose `length` tokens in a row by the text alone, so that every model's map has the same.

    Fewest adjacent blanks come first, then most pairs of one label, then the earliest.
    """
    if len(states.tokens) <= length:
        return states
    blank = np.array([not printable(token) for token in states.tokens])

    def worth(start: int) -> tuple[int, int, int]:
        part = slice(start, start + length)
        after = blank[start + 1 : start + length + 1]
        equal = states.equal[part, part] & ~after[:, None] & ~after[None, :]
        return -int((blank[part] & after).sum()), int(equal.sum()), -start

    first = max(range(len(states.tokens) - length), key=worth)  # the last token's next one has no text
    part = slice(first, first + length)
    return HiddenStates(
        states.name, states.hidden[part], states.tokens[part], states.labels[part], states.tokens[part.stop]
    )


def draw_heatmaps(several: Sequence[HiddenStates], *, columns: int, title: str = "") -> Figure:
    """Draw one heat-map for each model, on one colour scale, with pairs of one label framed."""
    from matplotlib.figure import Figure

    rows = -(-len(several) // columns)
    figure = Figure(figsize=(3.6 * columns + 1.9, 3.9 * rows + 0.9), dpi=160, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for place, (axes, states) in enumerate(zip(grid.ravel(), map(excerpt, several), strict=False)):
        means, count = mean_cosines(states), len(states.tokens)
        image = axes.imshow(states.cosine, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
        framed_rows, framed_columns = np.nonzero(states.equal)
        side = 0.8 * 72 * 3.0 / count  # points: a map is about three inches wide
        axes.scatter(framed_columns, framed_rows, s=side**2, marker="s", fc="none", ec="black", linewidths=0.8)
        axes.set_title(f"{states.name}\nmean cosine: same {means.same:+.3f}, other {means.other:+.3f}", fontsize=10)
        axes.tick_params(length=0)
        last = states.after or str(states.labels[-1])
        words = [printable(token) or "\u2423" for token in (*states.tokens, last)]
        names, after = [f"{one} -> {two}" for one, two in pairwise(words)], words[1:]
        axes.set_xticks(range(count), after, rotation=90, fontsize=8)
        axes.set_yticks(range(count), [""] * count if place % columns else names, fontsize=8)
    figure.colorbar(image, ax=list(grid.ravel()), label="cosine of two hidden states", shrink=0.6)
    figure.supxlabel("next token (framed: pairs with the same one)", fontsize=9)
    figure.supylabel("token read -> next token", fontsize=9)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    return figure


def printable(token: str, width: int = 11) -> str:
    """Shorten a token to a label: "" for blanks, no mark of a word's start, nothing read as mathematics."""
    for blank in "\n\t\r\u2581":  # the last one is sentencepiece's
        token = token.replace(blank, " ")
    text = "".join("?" if unicodedata.category(letter).startswith("C") else letter for letter in token).strip()
    return (text if len(text) <= width else text[: width - 1] + "~").replace("$", r"\$")
