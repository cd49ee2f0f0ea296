# SPDX-License-Identifier: Apache-2.0
"""How alike the hidden states of one text are under several models: cosine heat-maps side by side.

The picture is that of Figure 1 of the SimReg paper (arXiv 2605.08809): row i, column j shows cos(h_i, h_j).
"""

from __future__ import annotations

import unicodedata
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from numpy.typing import NDArray

from simreg_megatron.report.runs import ReportError

COLOUR_MAP = "RdBu_r"  # blue -1, white 0, red 1; told apart without red-green vision
MAX_NAMED_TOKENS = 48  # more would not be readable


@dataclass(frozen=True)
class HiddenStates:
    """One text under one model: hidden [n, d], tokens n strings or ids."""

    name: str
    hidden: NDArray[np.float32]
    tokens: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.hidden.ndim != 2 or len(self.hidden) < 2:
            raise ReportError(
                f"{self.name}: hidden states must be [n, d] with n of at least 2, not {self.hidden.shape}"
            )
        if len(self.tokens) != len(self.hidden):
            raise ReportError(f"{self.name}: {len(self.hidden)} hidden states but {len(self.tokens)} tokens")


def read_hidden_states(path: str | Path, *, name: str) -> HiddenStates:
    """Read `hidden` [n, d] and `tokens` [n] from an .npz file; nothing in it is unpickled.

    Raises:
        ReportError: the file is missing or is not such a file.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            hidden, tokens = arrays["hidden"], arrays["tokens"]
    except FileNotFoundError:
        raise ReportError(f"{path} is not there: the probe of {name} wrote nothing") from None
    except (KeyError, OSError, ValueError, zipfile.BadZipFile) as error:
        raise ReportError(f"{path} does not hold the arrays `hidden` and `tokens`: {error}") from None
    return HiddenStates(name=name, hidden=hidden, tokens=tuple(str(token) for token in tokens))


def cosine_matrix(hidden: NDArray[np.float32]) -> NDArray[np.float64]:
    """C_ij = h_i . h_j / (|h_i| |h_j|), 0 where a norm is 0. hidden [n, d] to [n, n]."""
    hidden = hidden.astype(np.float64)
    norms = np.linalg.norm(hidden, axis=1, keepdims=True)
    units = np.divide(hidden, norms, out=np.zeros_like(hidden), where=norms > 0)
    return units @ units.T


def mean_off_diagonal(matrix: NDArray[np.float64]) -> float:
    """The mean over i != j. matrix [n, n]."""
    count = len(matrix)
    return float((matrix.sum() - np.trace(matrix)) / (count * (count - 1)))


def mean_cosine(states: HiddenStates, *, max_tokens: int = MAX_NAMED_TOKENS) -> float:
    """What a map's title states: the mean cosine of two different tokens among the first `max_tokens`."""
    return mean_off_diagonal(cosine_matrix(states.hidden[:max_tokens]))


def draw_heatmaps(
    several: Sequence[HiddenStates],
    path: str | Path,
    *,
    max_tokens: int = MAX_NAMED_TOKENS,
    title: str | None = None,
) -> Figure:
    """Draw one heat-map per model on one colour scale and save the figure.

    Args:
        several: the same text under each model, from left to right.
        path: image file, PNG or whatever its ending asks for.
        max_tokens: only the first so many tokens are drawn and averaged.
        title: above all maps.

    Returns:
        The figure as saved; each map's title states its mean off-diagonal cosine.
    """
    figure = Figure(figsize=(5.6 * len(several) + 0.9, 6.2), dpi=130, layout="constrained")
    columns = figure.subplots(1, len(several), squeeze=False)[0]
    for axes, states in zip(columns, several, strict=True):
        image = _draw_map(axes, states, max_tokens)
    figure.colorbar(image, ax=list(columns), label="cosine of hidden states", shrink=0.75, pad=0.02)
    if title:
        figure.suptitle(title, fontsize=13, fontweight="bold")
    figure.savefig(path)
    return figure


def _draw_map(axes: Axes, states: HiddenStates, max_tokens: int) -> AxesImage:
    cosine = cosine_matrix(states.hidden[:max_tokens])
    image = axes.imshow(cosine, cmap=COLOUR_MAP, vmin=-1, vmax=1, interpolation="nearest")
    mean = mean_cosine(states, max_tokens=max_tokens)
    axes.set_title(f"{states.name}\nmean off-diagonal cosine {mean:+.3f}", fontsize=11)
    axes.tick_params(length=0)
    axes.set_xlabel("token")
    if len(cosine) <= MAX_NAMED_TOKENS:
        labels = [printable(token) for token in states.tokens[:max_tokens]]
        axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=6.5)
        axes.set_yticks(range(len(labels)), labels, fontsize=6.5)
    return image


def printable(token: str, *, width: int = 12) -> str:
    """A token as a tick label: sentencepiece's mark of a word's start left out, nothing read as mathematics."""
    text = "".join("?" if unicodedata.category(letter).startswith("C") else letter for letter in token)
    text = text.replace("\u2581", " ").strip() or "_"
    text = text if len(text) <= width else text[: width - 1] + "~"
    return text.replace("$", r"\$")
