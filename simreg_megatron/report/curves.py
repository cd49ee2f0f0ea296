# SPDX-License-Identifier: Apache-2.0
"""Training curves of several runs in one figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from simreg_megatron.report import runs
from simreg_megatron.report.runs import Run, Series

# Okabe and Ito's palette, told apart under every common colour blindness; dashes and markers help in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v")


@dataclass(frozen=True)
class Panel:
    """One scalar of every run on its own axes."""

    tag: str
    title: str
    unit: str
    log: bool = False


PANELS = (
    Panel(runs.VALIDATION_LOSS, "Validation loss", "nats per token"),
    Panel(runs.TRAIN_LOSS, "Training loss (cross-entropy alone)", "nats per token"),
    Panel(runs.SIMREG_LOSS, "SimReg loss", "nats per token, log scale", log=True),
    Panel(runs.NEGATIVE_COSINE, "Mean cosine of tokens with different labels", "cosine, -1 to 1"),
)

MAX_MARKED_POINTS = 30  # more are drawn as a line alone
SMOOTHED_POINTS = 100  # longer curves are drawn pale, with their running mean on top


def draw_curves(
    several: Sequence[Run],
    path: str | Path,
    *,
    panels: Sequence[Panel] = PANELS,
    title: str | None = None,
) -> Figure:
    """Draw the scalars of several runs over the training steps and save the figure.

    Args:
        several: the runs, in the order of the legend.
        path: image file, PNG or whatever its ending asks for.
        panels: what to draw, two panels in a row.
        title: above all panels.

    Returns:
        The figure as saved. A panel whose scalar no run logged says so.
    """
    rows = -(-len(panels) // 2)
    figure = Figure(figsize=(11, 3.6 * rows + 0.7), dpi=130, layout="constrained")
    grid = figure.subplots(rows, 2, squeeze=False).ravel()
    for axes, panel in zip(grid, panels, strict=False):
        _draw_panel(axes, panel, several)
    for axes in grid[len(panels) :]:
        axes.remove()
    _add_legend(figure)
    if title:
        figure.suptitle(title, fontsize=13, fontweight="bold")
    figure.savefig(path)
    return figure


def _draw_panel(axes: Axes, panel: Panel, several: Sequence[Run]) -> None:
    axes.set_title(panel.title, fontsize=11, loc="left")
    axes.set_xlabel("training step")
    axes.set_ylabel(panel.unit)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    drawn = [(index, run.name, run.scalars[panel.tag]) for index, run in enumerate(several) if panel.tag in run.scalars]
    for index, name, series in drawn:
        _draw_series(axes, series, name, index)
    if not drawn:
        axes.text(0.5, 0.5, f'"{panel.tag}" was not logged', transform=axes.transAxes, ha="center", color="0.4")
    elif panel.log:
        axes.set_yscale("log", nonpositive="mask")
    elif panel.tag == runs.TRAIN_LOSS:
        _leave_out_the_start(axes, [series for _, _, series in drawn])


def _draw_series(axes: Axes, series: Series, name: str, index: int) -> None:
    colour = COLOURS[index % len(COLOURS)]
    steps, values = series
    smooth = len(values) > SMOOTHED_POINTS
    if smooth:
        axes.plot(steps, values, color=colour, alpha=0.2, linewidth=0.8, gid="raw")
        values = running_mean(values, len(values) // 20)
    marked = len(values) <= MAX_MARKED_POINTS
    axes.plot(
        steps,
        values,
        label=name,
        color=colour,
        linestyle=DASHES[index % len(DASHES)],
        linewidth=1.8,
        marker=MARKERS[index % len(MARKERS)] if marked else None,
        markersize=4,
        gid="smooth" if smooth else "raw",
    )


def running_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """y_i = mean of x_(i-window+1) .. x_i, of fewer at the start: it never looks ahead. values [n] to [n]."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - window, 0)
    return (sums[end] - sums[start]) / (end - start)


def _leave_out_the_start(axes: Axes, drawn: Sequence[Series]) -> None:
    """The loss falls steeply at first; the axis shows what differs later, from the first twentieth of the run on."""
    last = max(series.steps[-1] for series in drawn)
    values = np.concatenate([series.values[series.steps >= last / 20] for series in drawn])
    values = values[np.isfinite(values)]
    if values.size and np.ptp(values) > 0:
        margin = 0.05 * np.ptp(values)
        axes.set_ylim(values.min() - margin, values.max() + margin)


def _add_legend(figure: Figure) -> None:
    """One legend for all panels, below them; matplotlib keeps labels that open with "_" out of legends."""
    lines = [line for axes in figure.axes for line in axes.lines]
    handles = {str(line.get_label()): line for line in lines if not str(line.get_label()).startswith("_")}
    if handles:
        figure.legend(handles=list(handles.values()), loc="outside lower center", ncols=len(handles), frameon=False)
