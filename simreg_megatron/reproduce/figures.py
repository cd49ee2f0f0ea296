# SPDX-License-Identifier: Apache-2.0
"""Figures of an experiment: where every seed of every arm ended, and the way there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from simreg_megatron.report.curves import COLOURS, DASHES, MARKERS, label_ends, plain_axes
from simreg_megatron.report.page import Picture
from simreg_megatron.reproduce.check import Table
from simreg_megatron.reproduce.verdict import Place, Row

_UNITS = {
    "validation_loss": "validation loss (nats per token)",
    "train_loss": "training loss (nats per token)",
    "negative_cosine": "mean cosine, different labels",
    "positive_cosine": "mean cosine, same label",
    "isotropy": "isotropy (0 to 1)",
    "simreg_loss": "SimReg loss (nats per token)",
    "margin_10": "margin, 10 % quantile (nats)",
    "margin_50": "margin, median (nats)",
    "margin_90": "margin, 90 % quantile (nats)",
    "margin": "mean margin (nats)",
    "margin_right_10": "margin of right predictions, 10 % quantile (nats)",
    "margin_right_50": "margin of right predictions, median (nats)",
    "margin_right_90": "margin of right predictions, 90 % quantile (nats)",
    "margin_right": "mean margin of right predictions (nats)",
    "right_share": "share of right predictions",
    "rare_norm_difference": "norms of rare labels (Cohen's d)",
    "seconds_per_step": "seconds per step",
}


_PANELS_IN_A_ROW = 3


def pictures(table: Table) -> list[Picture]:
    """Both figures; none of a table that cannot be read, of which `check.violations` says what is wrong."""
    if any(None in row.values() for row in table.rows):  # a line was cut
        return []
    try:
        drawn = ends(table), curves(table)
    except (AttributeError, LookupError, ValueError, TypeError, ArithmeticError):
        return []
    return [
        Picture("ends", drawn[0], "Where every seed ended (a mark each), and their mean (the bar)."),
        Picture("curves", drawn[1], "The way there: mean over the seeds, at the largest size."),
    ]


def ends(table: Table) -> Figure:
    """A panel for each size, length and metric of the claims: a dot for each seed, a bar for their mean."""
    metrics = list(dict.fromkeys(claim.metric for claim in table.plan.claims)) or ["validation_loss"]
    places = list(dict.fromkeys(_place(row) for row in table.rows))
    panels = [(metric, place) for metric in metrics for place in places]
    columns = min(len(panels), _PANELS_IN_A_ROW)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(max(3.2 * columns, 4.5), 3.4 * rows), dpi=160, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (metric, place) in zip(grid, panels, strict=False):
        _draw_ends(axes, [row for row in table.rows if _place(row) == place], metric)
        title = f"size {place.size}, {place.tokens_per_parameter} tokens a parameter"
        axes.set_title(title, fontsize=10, loc="left", parse_math=False)
    for axes in grid[len(panels) :]:
        axes.remove()
    return figure


def curves(table: Table, tag: str = "train_loss") -> Figure:
    """The mean over the seeds of each arm at the largest size, from the first twentieth of the run on."""
    place = _place(table.rows[-1])
    figure = Figure(figsize=(7.5, 3.6), dpi=160, layout="constrained")
    axes = figure.subplots()
    for index, arm in enumerate(table.plan.arms):
        runs = {row["run"] for row in table.rows if row["arm"] == arm.name and _place(row) == place}
        points = _means(runs, table.curves, tag)
        if len(points):
            steps, values = points.T
            shown = steps > steps[-1] / 20
            dash = DASHES[index % len(DASHES)]
            axes.plot(steps[shown], values[shown], dash, color=_colour(index), label=arm.name, linewidth=1.6)
    axes.set_xlabel("training step")
    axes.set_ylabel(f"{_UNITS.get(tag, tag)}; lower is better", fontsize=9)
    plain_axes(axes)
    if axes.lines:
        axes.legend(frameon=False, fontsize=9)
        label_ends(figure)
    else:
        axes.text(0.5, 0.5, f"{tag} was not logged", transform=axes.transAxes, ha="center", color="0.4")
    return figure


def _draw_ends(axes: Axes, rows: Sequence[Row], metric: str) -> None:
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    for index, arm in enumerate(arms):
        values = [float(row[metric]) for row in rows if row["arm"] == arm and row[metric]]
        marker, colour = MARKERS[index % len(MARKERS)], _colour(index)
        axes.plot([index] * len(values), values, marker, color=colour, markersize=5, alpha=0.8)
        if values:
            axes.hlines(np.mean(values), index - 0.3, index + 0.3, color=colour, linewidth=2)
    axes.set_xticks(range(len(arms)), arms, rotation=30, ha="right", fontsize=8)
    axes.set_ylabel(_UNITS.get(metric, metric))
    plain_axes(axes)


def _means(runs: set[str], points: Sequence[Row], tag: str) -> np.ndarray:
    """[steps, 2]: step and mean value, at the steps that all of the runs have."""
    by_step: dict[int, list[float]] = {}
    for point in points:
        if point["run"] in runs and point["tag"] == tag:
            by_step.setdefault(int(point["step"]), []).append(float(point["value"]))
    shared = [(step, np.mean(values)) for step, values in sorted(by_step.items()) if len(values) == len(runs)]
    return np.array(shared)


def _place(row: Row) -> Place:
    return Place(row["size"], row["tokens_per_parameter"])


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
