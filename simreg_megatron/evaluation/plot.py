# SPDX-License-Identifier: Apache-2.0
"""The results as bars: one group a task, one bar a model, one standard error up and down."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from simreg_megatron.evaluation.results import ModelResults


def draw(models: Sequence[ModelResults], path: Path) -> bool:
    """Write the figure to `path`; whether there is anything to draw: a task whose score is a share of its questions."""
    tasks = [task for task, score in models[0].scores.items() if score.is_share]
    if not tasks:
        return False
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    width = 0.8 / len(models)
    figure, axes = plt.subplots(figsize=(max(5.0, 1.3 * len(tasks)), 3.6), layout="constrained")
    for index, model in enumerate(models):
        places = [place + (index - (len(models) - 1) / 2) * width for place in range(len(tasks))]
        scores = [model.scores.get(task) for task in tasks]
        heights = [100 * score.value if score else 0.0 for score in scores]
        errors = [100 * (score.error or 0.0) if score else 0.0 for score in scores]
        axes.bar(places, heights, width, yerr=errors, capsize=2, label=model.name)
    axes.set_xticks(range(len(tasks)), tasks, rotation=20, ha="right")
    axes.set_ylabel("score (%)")
    axes.legend(frameon=False, ncols=len(models), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True
