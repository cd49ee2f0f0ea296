# SPDX-License-Identifier: Apache-2.0
"""Training curves of several runs in one figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from simreg_megatron.report import runs
from simreg_megatron.report.runs import Run, Series

# Okabe and Ito's palette, told apart under every common colour blindness; dashes and markers help in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


@dataclass(frozen=True)
class Panel:
    """One scalar of every run on its own axes."""

    tag: str
    title: str
    unit: str
    log: bool = False
    lower_is_better: bool = False

    @property
    def label(self) -> str:
        return f"{self.unit}; lower is better" if self.lower_is_better else self.unit


_NATS, _COSINE = "nats per token", "cosine, -1 to 1"
PANELS = (
    Panel(runs.VALIDATION_LOSS, "Validation loss", _NATS, lower_is_better=True),
    Panel(runs.TRAIN_LOSS, "Training loss, SimReg's term left out", _NATS, lower_is_better=True),
    Panel(runs.SIMREG_LOSS, "SimReg loss", f"{_NATS} (log)", log=True, lower_is_better=True),
    Panel(runs.NEGATIVE_COSINE, "Mean cosine, different next tokens", _COSINE),
)
FURTHER = (
    Panel(runs.POSITIVE_COSINE, "Mean cosine, same next token", _COSINE),
    Panel(runs.ISOTROPY, "Isotropy of the hidden states", "IsoScore, 0 to 1"),
)

MAX_MARKED_POINTS = 30  # more are drawn as a line alone
SMOOTHED_POINTS = 100  # longer curves are drawn pale, with their running mean on top
_POINTS_APART = 11  # of end values, so that none covers another


def panels_of(several: Sequence[Run]) -> tuple[Panel, ...]:
    """What is drawn of any runs, then what these ones logged beyond it: cosines, isotropy, margins."""
    logged = sorted({tag for run in several for tag in run.scalars})
    margins = (
        Panel(tag, tag.removeprefix("simreg ").capitalize(), "nats") for tag in logged if tag.startswith(runs.MARGIN)
    )
    return (*PANELS, *(panel for panel in FURTHER if panel.tag in logged), *margins)


def draw_curves(
    several: Sequence[Run],
    path: str | Path | None,
    *,
    panels: Sequence[Panel] = PANELS,
    title: str | None = None,
) -> Figure:
    """Draw the scalars of several runs over the training steps and save the figure.

    Args:
        several: the runs, in the order of the legend.
        path: image file, PNG or whatever its ending asks for; None saves nothing.
        panels: what to draw, two panels in a row.
        title: above all panels.

    Returns:
        The figure as saved. A panel whose scalar no run logged says so.
    """
    rows = -(-len(panels) // 2)
    figure = Figure(figsize=(9, 3.2 * rows + 0.7), dpi=160, layout="constrained")
    grid = figure.subplots(rows, 2, squeeze=False).ravel()
    for axes, panel in zip(grid, panels, strict=False):
        _draw_panel(axes, panel, several)
    for axes in grid[len(panels) :]:
        axes.remove()
    _add_legend(figure)
    if title:
        figure.suptitle(title, fontsize=12, fontweight="bold")
    label_ends(figure)
    if path is not None:
        figure.savefig(path)
    return figure


def _draw_panel(axes: Axes, panel: Panel, several: Sequence[Run]) -> None:
    axes.set_title(panel.title, fontsize=11, loc="left")
    axes.set_xlabel("training step")
    axes.set_ylabel(panel.label)
    plain_axes(axes)
    drawn = [(index, run, run.scalars[panel.tag]) for index, run in enumerate(several) if panel.tag in run.scalars]
    for index, run, series in drawn:
        _draw_series(axes, series, run.name, index, smooths=panel.tag != runs.VALIDATION_LOSS)
    if not drawn:
        axes.text(0.5, 0.5, f'"{panel.tag}" was not logged', transform=axes.transAxes, ha="center", color="0.4")
        return
    if panel.log:
        axes.set_yscale("log", nonpositive="mask")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif panel.tag == runs.TRAIN_LOSS:
        leave_out_the_start(axes, [series for _, _, series in drawn])
    _tell_tokens(axes, {run.tokens_per_step for _, run, _ in drawn})


def plain_axes(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)


def _draw_series(axes: Axes, series: Series, name: str, index: int, *, smooths: bool) -> None:
    """A validation loss is drawn as it is, however often it was measured: its end is what runs are compared by."""
    colour = COLOURS[index % len(COLOURS)]
    steps, values = series
    smooth = smooths and len(values) > SMOOTHED_POINTS
    if smooth:
        axes.plot(steps, values, color=colour, alpha=0.2, linewidth=0.8, gid="raw")
        values = running_mean(values, len(values) // 20)
    marked = len(values) <= MAX_MARKED_POINTS
    axes.plot(
        steps,
        values,
        label=_shown(name),
        color=colour,
        linestyle=DASHES[index % len(DASHES)],
        linewidth=1.8,
        marker=MARKERS[index % len(MARKERS)] if marked else None,
        markersize=4,
        gid="smooth" if smooth else "raw",
    )


def _shown(name: str) -> str:
    """What matplotlib would read as mathematics, or leave out, is shown as it stands."""
    name = name.replace("$", r"\$")
    return f" {name}" if name.startswith("_") else name


def running_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """y_i = mean of x_(i-window+1) .. x_i, of fewer at the start: it never looks ahead. values [n] to [n].

    A value that is not finite is left out; where there is no other, so is the mean (NaN).
    """
    finite = np.isfinite(values)
    sums, counts = (np.concatenate([[0.0], np.cumsum(each)]) for each in (np.where(finite, values, 0.0), finite))
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - window, 0)
    found = counts[end] - counts[start]
    return np.where(found > 0, (sums[end] - sums[start]) / np.maximum(found, 1), np.nan)


def leave_out_the_start(axes: Axes, drawn: Sequence[Series]) -> None:
    """The loss falls steeply at first; the axis shows what differs later, from the first twentieth of each run on."""
    values = np.concatenate([series.values[series.steps >= series.steps[-1] / 20] for series in drawn])
    values = values[np.isfinite(values)]
    if values.size and np.ptp(values) > 0:
        margin = 0.05 * np.ptp(values)
        axes.set_ylim(values.min() - margin, values.max() + margin)


def _tell_tokens(axes: Axes, tokens_per_step: set[int | None]) -> None:
    """Tokens under the steps, where all runs of the panel take equally many a step."""
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    (only, *others) = tokens_per_step
    if only is not None and not others:
        axes.xaxis.set_major_formatter(lambda step, _: f"{step:g}\n{short_count(only * step)}")
        axes.set_xlabel("training step, and tokens below it")


def short_count(number: float) -> str:
    """819200 as 819 k, in three digits."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:g}"


def label_ends(figure: Figure, told: Callable[[Line2D], str] | None = None, *, colour: str | None = None) -> None:
    """A word beside each line's end, when all else is drawn: moved up or down until no two touch, and none the axis.

    Args:
        told: the word; by default the last value.
        colour: by default the line's own.
    """
    figure.draw_without_rendering()  # the axes have their final places
    for axes in figure.axes:
        _label_ends_of(axes, told or partial(_last_value, is_log=axes.get_yscale() == "log"), colour, 72 / figure.dpi)


def _last_value(line: Line2D, *, is_log: bool) -> str:
    value = _end(line)[1]
    return format(value, ".3g" if is_log else ".3f" if abs(value) < 1e4 else ".4g")


def _end(line: Line2D) -> tuple[float, float]:
    x, y = np.asarray(line.get_xydata(), dtype=np.float64)[-1]
    return float(x), float(y)


def _label_ends_of(axes: Axes, told: Callable[[Line2D], str], colour: str | None, points: float) -> None:
    """points: of a pixel."""
    named = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    lines = [line for line in named if np.isfinite(_end(line)[1]) and (_end(line)[1] > 0 or axes.get_yscale() != "log")]
    heights = [points * float(axes.transData.transform(_end(line))[1]) for line in lines]
    lowest = points * axes.get_window_extent().y0 + _POINTS_APART / 2
    for line, height, shown in zip(lines, heights, spread(heights, _POINTS_APART, lowest), strict=True):
        axes.annotate(
            told(line), _end(line), (7, shown - height), textcoords="offset points", va="center", fontsize=9,
            color=colour or line.get_color(), fontweight="bold" if colour is None else "normal",
            annotation_clip=False, gid="end",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
        )  # fmt: skip


def spread(heights: Sequence[float], apart: float, lowest: float = -np.inf) -> list[float]:
    """The heights, in their order, moved as little as it takes to be `apart` and not below `lowest`."""
    order = np.argsort(heights, kind="stable")
    groups: list[tuple[float, int]] = []  # (centre, members) of runs of labels that touch
    for place in order:
        groups.append((heights[place], 1))
        while len(groups) > 1 and groups[-1][0] - groups[-2][0] < apart * (groups[-1][1] + groups[-2][1]) / 2:
            (above, one), (below, other) = groups.pop(), groups.pop()
            groups.append(((above * one + below * other) / (one + other), one + other))
    shown = [centre + apart * (place - (count - 1) / 2) for centre, count in groups for place in range(count)]
    found = [0.0] * len(shown)
    for rank, (place, height) in enumerate(zip(order, shown, strict=True)):
        found[place] = max(height, lowest + apart * rank)
    return found


def _add_legend(figure: Figure) -> None:
    """One legend for all panels, below them; matplotlib keeps labels that open with "_" out of legends."""
    lines = [line for axes in figure.axes for line in axes.lines]
    handles = {str(line.get_label()): line for line in lines if not str(line.get_label()).startswith("_")}
    if handles:
        columns = min(len(handles), 4)
        figure.legend(handles=list(handles.values()), loc="outside lower center", ncols=columns, frameon=False)
