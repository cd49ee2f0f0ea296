# SPDX-License-Identifier: Apache-2.0
"""The results as Markdown: a row a model, a column a task, differences from the first, the paper's rows below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from simreg_megatron.evaluation.results import ModelResults, Score, difference

_PERCENT = 100.0


def scores_table(
    models: Sequence[ModelResults], *, paper: Mapping[str, Mapping[str, float]] | None = None, name: str = "paper"
) -> str:
    """Per cent with standard errors; `paper` holds rows by method and task, `name` says of what."""
    tasks = list(models[0].scores)
    if not tasks:
        return ""
    metrics = {task: models[0].scores[task].metric for task in tasks}
    lines = [_line("model", *(f"{task} ({metrics[task]})" for task in tasks), "mean"), _rule(len(tasks) + 2)]
    for model in models:
        lines.append(_line(model.name, *(_value(model.scores.get(task)) for task in tasks), _mean(model, tasks)))
    first = models[0]
    for model in models[1:]:
        cells = [_difference(model.scores.get(task), first.scores.get(task)) for task in tasks]
        lines.append(_line(f"{model.name} minus {first.name}", *cells, _mean_difference(model, first, tasks)))
    for method, values in (paper or {}).items():
        shown = [f"{values[task]:.2f}" if task in values else "" for task in tasks]
        mean = f"{sum(values[task] for task in tasks) / len(tasks):.2f}" if set(tasks) <= set(values) else ""
        lines.append(_line(f"{name}: {method}", *shown, mean))
    return "\n".join(lines) + "\n"


def perplexity_table(models: Sequence[ModelResults]) -> str:
    rows = [(model.name, held) for model in models for held in model.perplexities]
    if not rows:
        return ""
    head = ("model", "features", "validation loss (nats per token)", "perplexity", "tokens", "sequence length")
    lines = [_line(*head), _rule(len(head))]
    for name, held in rows:
        numbers = (f"{held.loss:.6f}", f"{held.perplexity:.4f}", f"{held.tokens:,}", str(held.seq_length))
        lines.append(_line(name, str(held.features), *numbers))
    return "\n".join(lines) + "\n"


def report(
    models: Sequence[ModelResults],
    settings: Mapping[str, Any],
    *,
    paper: Mapping[str, Mapping[str, float]] | None = None,
    name: str = "paper",
) -> str:
    """The whole page."""
    parts = ["# Zero-shot evaluation\n"]
    if settings.get("limit") is not None:
        parts.append(f"**Only the first {settings['limit']} questions of each task: a trial, not to be compared.**\n")
    parts += [scores_table(models, paper=paper, name=name), perplexity_table(models)]
    if len(models) > 1 and models[0].scores:
        parts.append(
            "Differences are in points; after ± stands one standard error, which takes the models for independent. "
            "One seed each: the spread between training seeds is not in it.\n"
        )
    parts.append("\n".join(f"- {key}: {value}" for key, value in settings.items() if value is not None) + "\n")
    parts.append("\n".join(f"- {model.name}: {model.path}" for model in models) + "\n")
    return "\n".join(part for part in parts if part)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(columns: int) -> str:
    return _line(*["---"] * columns)


def _value(score: Score | None) -> str:
    if score is None:
        return "not run"
    error = f" ± {_PERCENT * score.error:.2f}" if score.error is not None else ""
    return f"{_PERCENT * score.value:.2f}{error}"


def _difference(score: Score | None, first: Score | None) -> str:
    if score is None or first is None:
        return ""
    apart = difference(score, first)
    error = f" ± {_PERCENT * apart.error:.2f}" if apart.error is not None else ""
    return f"{_PERCENT * apart.value:+.2f}{error}"


def _mean(model: ModelResults, tasks: Sequence[str]) -> str:
    mean = model.mean(tasks)
    return "" if mean is None else f"{_PERCENT * mean:.2f}"


def _mean_difference(model: ModelResults, first: ModelResults, tasks: Sequence[str]) -> str:
    means = [one.mean(tasks) for one in (model, first)]
    return "" if None in means else f"{_PERCENT * (means[0] - means[1]):+.2f}"  # type: ignore[operator]
