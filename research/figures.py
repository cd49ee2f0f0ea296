# SPDX-License-Identifier: Apache-2.0
"""A figure of an experiment: the mean training loss of each arm at its largest size, and where each seed ended."""

from __future__ import annotations

from statistics import mean
from typing import TYPE_CHECKING

from research.tables import Table
from simreg_megatron.tools.curves import COLOURS, DASHES, plain_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(table: Table) -> Figure:
    """Draw the training loss over the steps, and the metric of the first claim at each size and length."""
    from matplotlib.figure import Figure

    metric = table.plan.claims[0].metric if table.plan.claims else "validation_loss"
    places = table.places
    figure = Figure(figsize=(4.5 + 3.2 * len(places), 3.6), dpi=120, layout="constrained")
    figure.suptitle(table.plan.question, fontsize=10)
    way, *ends = figure.subplots(1, 1 + len(places), width_ratios=[1.5] + [1] * len(places), squeeze=False)[0]
    for index, arm in enumerate(table.plan.arms):
        colour = COLOURS[index % len(COLOURS)]
        losses: dict[int, list[float]] = {}
        rows = table.of(arm, places[-1])
        for row in rows:
            for step, loss in table.curves.get(row["run"], {}).get("train_loss", ()):
                losses.setdefault(step, []).append(loss)
        steps = [step for step in sorted(losses) if len(losses[step]) == len(rows) and step > max(losses) / 20]
        way.plot(steps, [mean(losses[step]) for step in steps], DASHES[index % 4], color=colour, label=arm)
        for axes, place in zip(ends, places, strict=True):
            values = [float(row[metric]) for row in table.of(arm, place) if row[metric]]
            axes.plot([index] * len(values), values, "o", color=colour, alpha=0.7)
            if values:
                axes.hlines(mean(values), index - 0.3, index + 0.3, color=colour)
    way.set(xlabel="training step", ylabel="training loss, nats per token", title=f"size {places[-1][0]}")
    way.legend(frameon=False, fontsize=8)
    for axes, (size, length) in zip(ends, places, strict=True):
        axes.set(title=f"size {size}, {length} tokens a parameter", ylabel=metric.replace("_", " "))
        axes.set_xticks(range(len(table.plan.arms)), list(table.plan.arms), rotation=30, ha="right", fontsize=8)
    for axes in (way, *ends):
        plain_axes(axes)
    return figure
