# SPDX-License-Identifier: Apache-2.0
"""How alike the hidden states of one text are under several models: cosine heat-maps side by side.

    same  = mean of cos(h_i, h_j) over i != j with y_i = y_j,    other = the mean over y_i != y_j

The picture is that of Figure 1 of the SimReg paper (arXiv 2605.08809). A state stands for the token that comes next, as
that is its label y: rows are named "token read -> next token", columns by the next token alone.
"""

from __future__ import annotations

import unicodedata
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from numpy.typing import NDArray

from simreg_megatron.report.runs import ReportError

COLOUR_MAP = "RdBu_r"  # blue -1, white 0, red 1; told apart without red-green vision
MAX_NAMED_TOKENS = 24  # more could not be read where a page shows the figure 800 pixels wide
BLANK = "\u2423"  # an open box, for tokens of blanks alone


@dataclass(frozen=True)
class HiddenStates:
    """One text under one model: hidden [n, d], tokens n strings or ids, labels [n] the ids of the next tokens.

    after: the text of the last label; where it is not known, its id stands for it.
    """

    name: str
    hidden: NDArray[np.float32]
    tokens: tuple[str, ...]
    labels: NDArray[np.int64]
    after: str = ""

    def __post_init__(self) -> None:
        if not np.issubdtype(self.hidden.dtype, np.number) or not np.issubdtype(self.labels.dtype, np.integer):
            raise ReportError(
                f"{self.name}: hidden states must be numbers and labels whole ones, not {self.hidden.dtype} and "
                f"{self.labels.dtype}"
            )
        if self.labels.ndim != 1:
            raise ReportError(f"{self.name}: labels must be [n], not {self.labels.shape}")
        if self.hidden.ndim != 2 or len(self.hidden) < 2:
            raise ReportError(
                f"{self.name}: hidden states must be [n, d] with n of at least 2, not {self.hidden.shape}"
            )
        if not len(self.tokens) == len(self.labels) == len(self.hidden):
            raise ReportError(
                f"{self.name}: {len(self.hidden)} hidden states but {len(self.tokens)} tokens and {len(self.labels)} "
                "labels"
            )

    @property
    def next_tokens(self) -> tuple[str, ...]:
        """What each state stands for."""
        return (*self.tokens[1:], self.after or f"id {self.labels[-1]}")


def read_hidden_states(path: str | Path, *, name: str) -> HiddenStates:
    """Read `hidden` [n, d], `tokens` [n] and `labels` [n] from an .npz file; nothing in it is unpickled.

    Raises:
        ReportError: the file is missing or is not such a file.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            hidden, tokens, labels = arrays["hidden"], arrays["tokens"], arrays["labels"]
    except FileNotFoundError:
        raise ReportError(f"{path} is not there: the probe of {name} wrote nothing") from None
    except (KeyError, OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise ReportError(f"{path} does not hold the arrays `hidden`, `tokens` and `labels`: {error}") from None
    return HiddenStates(name=name, hidden=hidden, tokens=tuple(str(token) for token in tokens), labels=labels)


def cosine_matrix(hidden: NDArray[np.float32]) -> NDArray[np.float64]:
    """C_ij = h_i . h_j / (|h_i| |h_j|), 0 where a norm is 0, NaN where one is no number. hidden [n, d] to [n, n]."""
    hidden = hidden.astype(np.float64)
    norms = np.linalg.norm(hidden, axis=1, keepdims=True)
    units = np.divide(hidden, norms, out=np.zeros_like(hidden), where=norms != 0)
    return units @ units.T


class MeanCosines(NamedTuple):
    """Over the pairs of a text; NaN where there is no such pair."""

    same: float  # pairs of one label
    other: float  # pairs of two
    both: float


def mean_cosines(states: HiddenStates) -> MeanCosines:
    """What a map's title states, of the tokens that `excerpt` leaves."""
    cosine = cosine_matrix(states.hidden)
    pairs = ~np.eye(len(cosine), dtype=bool)
    same = pairs & _equal(states.labels)
    return MeanCosines(*(_mean(cosine[chosen]) for chosen in (same, pairs & ~same, pairs)))


def _equal(labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    return labels[:, None] == labels[None, :]


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if values.size else float("nan")


def excerpt(states: HiddenStates, *, length: int = MAX_NAMED_TOKENS) -> HiddenStates:
    """The part of the text that a map is drawn of: `length` tokens in a row that show something.

    Fewest blanks beside blanks, then most pairs of one label, then the earliest: a choice by the text alone, so every
    model's map has the same tokens.
    """
    if len(states.tokens) <= length:
        return states
    starts = range(len(states.tokens) - length)  # the last token's next one has no text
    first = max(starts, key=lambda start: _worth(states, slice(start, start + length)))
    part = slice(first, first + length)
    return HiddenStates(
        states.name, states.hidden[part], states.tokens[part], states.labels[part], states.tokens[part.stop]
    )


def _worth(states: HiddenStates, part: slice) -> tuple[int, int, int]:
    blank = [is_blank(token) for token in states.tokens[part.start : part.stop + 1]]
    runs = sum(one and other for one, other in pairwise(blank))
    shown = [not each for each in blank[1:]]  # pairs of one blank would say nothing to a reader
    labels = states.labels[part][shown]
    return -runs, int(_equal(labels).sum()), -part.start


def is_blank(token: str) -> bool:
    """Whether a token, as the probe or a tokenizer writes it, is of spaces, tabs and line ends alone."""
    return not token.replace("\\n", "").replace("\\t", "").replace("\\r", "").strip(" \t\r\n\u2581")


def draw_heatmaps(
    several: Sequence[HiddenStates],
    path: str | Path | None,
    *,
    columns: int | None = None,
    title: str | None = None,
) -> Figure:
    """Draw one heat-map per model on one colour scale and save the figure.

    Args:
        several: the same text under each model, in reading order; of a long text `excerpt` chooses the part.
        path: image file, PNG or whatever its ending asks for; None saves nothing.
        columns: maps in a row; all by default.
        title: above all maps.

    Returns:
        The figure as saved; each map's title states its mean cosines, pairs of one label are framed.
    """
    columns = columns or len(several)
    rows = -(-len(several) // columns)
    figure = Figure(figsize=(3.6 * columns + 1.9, 3.9 * rows + 0.9), dpi=160, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for place, states in enumerate(several):
        image = _draw_map(grid[place // columns, place % columns], excerpt(states), is_first=place % columns == 0)
    for axes in grid.ravel()[len(several) :]:
        axes.remove()
    figure.colorbar(image, ax=list(grid.ravel()[: len(several)]), label="cosine of two hidden states", shrink=0.6)
    figure.supxlabel("next token (framed: pairs with the same one)", fontsize=9)
    figure.supylabel("token read -> next token", fontsize=9)
    if title:
        figure.suptitle(title, fontsize=12, fontweight="bold")
    if path is not None:
        figure.savefig(path)
    return figure


def _draw_map(axes: Axes, states: HiddenStates, *, is_first: bool) -> AxesImage:
    cosine, means = cosine_matrix(states.hidden), mean_cosines(states)
    image = axes.imshow(cosine, cmap=COLOUR_MAP, vmin=-1, vmax=1, interpolation="nearest")
    rows, cols = np.nonzero(_equal(states.labels) & ~np.eye(len(cosine), dtype=bool))
    side = 0.8 * 72 * 3.0 / len(cosine)  # points: a map is about three inches wide
    axes.scatter(cols, rows, s=side**2, marker="s", facecolors="none", edgecolors="black", linewidths=0.8)
    axes.set_title(f"{states.name}\nmean cosine: same {means.same:+.3f}, other {means.other:+.3f}", fontsize=10)
    axes.tick_params(length=0)
    after = [printable(token) for token in states.next_tokens]
    axes.set_xticks(range(len(after)), after, rotation=90, fontsize=8)
    names = [f"{printable(token)} -> {label}" for token, label in zip(states.tokens, after, strict=True)]
    axes.set_yticks(range(len(names)), names if is_first else [""] * len(names), fontsize=8)
    return image


def printable(token: str, *, width: int = 11) -> str:
    """A token as a tick label: sentencepiece's mark of a word's start left out, nothing read as mathematics."""
    text = "".join("?" if unicodedata.category(letter).startswith("C") else letter for letter in token)
    text = text.replace("\u2581", " ").strip() or BLANK
    text = text if len(text) <= width else text[: width - 1] + "~"
    return text.replace("$", r"\$")
