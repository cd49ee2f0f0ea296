# SPDX-License-Identifier: Apache-2.0
"""The results as Markdown: a row a model, a column a task, differences from the first, the paper's rows below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from simreg_megatron.evaluation.paired import Paired, Pairs, mean_of
from simreg_megatron.evaluation.results import ModelResults, Score, difference

_PERCENT = 100.0


def scores_table(
    models: Sequence[ModelResults],
    *,
    paper: Mapping[str, Mapping[str, float]] | None = None,
    name: str = "paper",
    pairs: Mapping[str, Pairs] | None = None,
) -> str:
    """Per cent with standard errors, a star where guessing could have scored it; differences with the interval of the
    same questions, or else with the errors of independent ones. What is no share of the questions is shown as it is.
    `paper` holds rows by method and task, `name` says of what."""
    tasks = list(models[0].scores)
    if not tasks:
        return ""
    heads = [
        f"{task} ({score.metric}{'' if score.is_share else ', as it is'})" for task, score in models[0].scores.items()
    ]
    lines = [_line("model", *heads, "mean"), _rule(len(tasks) + 2)]
    for model in models:
        lines.append(_line(model.name, *(_value(model.scores.get(task)) for task in tasks), _mean(model, tasks)))
    first = models[0]
    for model in models[1:]:
        found = pairs[model.name].tasks if pairs and model.name in pairs else {}
        cells = [_difference(model.scores.get(task), first.scores.get(task), found.get(task)) for task in tasks]
        has_mean = set(tasks) <= set(found) and model.mean(tasks) is not None
        whole = mean_of([found[task] for task in tasks]) if has_mean else None
        mean = _mean_difference(model, first, tasks) if whole is None else _interval(whole, _PERCENT)
        lines.append(_line(f"{model.name} minus {first.name}", *cells, mean))
    for method, values in (paper or {}).items():
        shown = [f"{values[task]:.2f}" if task in values else "" for task in tasks]
        mean = f"{sum(values[task] for task in tasks) / len(tasks):.2f}" if set(tasks) <= set(values) else ""
        lines.append(_line(f"{name}: {method}", *shown, mean))
    return "\n".join(lines) + "\n"


def perplexity_table(models: Sequence[ModelResults]) -> str:
    rows = [(model.name, held) for model in models for held in model.perplexities]
    if not rows:
        return ""
    head = (
        "model", "features", "validation loss (nats per token)", "perplexity", "bits per byte", "tokens",
        "sequence length",
    )  # fmt: skip
    lines = [_line(*head), _rule(len(head))]
    for name, held in rows:
        bits = "-" if held.bits_per_byte is None else f"{held.bits_per_byte:.4f}"
        numbers = (f"{held.loss:.6f}", f"{held.perplexity:.4f}", bits, f"{held.tokens:,}", str(held.seq_length))
        lines.append(_line(name, str(held.features), *numbers))
    return "\n".join(lines) + "\n"


def losses_paired(first: str, pairs: Mapping[str, Pairs]) -> str:
    """A row for each other model: the difference over the same documents, with its interval."""
    rows = []
    for name, found in pairs.items():
        for each, unit in ((found.nats_per_token, "nats per token"), (found.bits_per_byte, "bits per byte")):
            if each is not None:
                told = f"{each.low:+.4f} to {each.high:+.4f}"
                rows.append(_line(f"{name} minus {first}", unit, f"{each.value:+.4f}", told, f"{each.number:,}"))
    if not rows:
        return ""
    head = ("difference of the validation loss", "unit", "paired by document", "95 % interval", "documents")
    return "\n".join([_line(*head), _rule(len(head)), *rows]) + "\n"


def report(
    models: Sequence[ModelResults],
    settings: Mapping[str, Any],
    *,
    paper: Mapping[str, Mapping[str, float]] | None = None,
    name: str = "paper",
    pairs: Mapping[str, Pairs] | None = None,
) -> str:
    """The whole page."""
    parts = ["# Zero-shot evaluation\n"]
    if settings.get("limit") is not None:
        parts.append(f"**Only the first {settings['limit']} questions of each task: a trial, not to be compared.**\n")
    parts += [scores_table(models, paper=paper, name=name, pairs=pairs), _chances(models)]
    parts += [perplexity_table(models), losses_paired(models[0].name, pairs or {})]
    if len(models) > 1:
        parts.append(
            "Differences of scores are in points. In brackets: the 95 % interval over the same questions or "
            "documents (bootstrap); after ±, where a score is no mean over its questions, one standard error, which "
            "takes the models for independent; neither where the harness gives no error. One seed each: the spread "
            "between training seeds is not in it.\n"
        )
    parts.append("\n".join(f"- {key}: {value}" for key, value in settings.items() if value is not None) + "\n")
    lines = [(f"- {model.name}: {model.path}", *(f"  - {note}" for note in model.notes)) for model in models]
    parts.append("\n".join(line for each in lines for line in each) + "\n")
    return "\n".join(part for part in parts if part)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(columns: int) -> str:
    return _line(*["---"] * columns)


def _value(score: Score | None) -> str:
    if score is None:
        return "not run"
    scale = _scale(score)
    error = f" ± {scale * score.error:.2f}" if score.error is not None else ""
    return f"{scale * score.value:.2f}{error}{' *' if score.is_noise else ''}"


def _scale(score: Score) -> float:
    return _PERCENT if score.is_share else 1.0


def _chances(models: Sequence[ModelResults]) -> str:
    """What a star means, task by task."""
    noisy = {task: score for model in models for task, score in model.scores.items() if score.is_noise}
    told = (f"{task} ({_PERCENT * (score.chance or 0):.1f})" for task, score in noisy.items())
    return (
        f"\\* within the noise of chance, so a difference there means nothing: {', '.join(told)}; in brackets what "
        "guessing, or one and the same answer, scores.\n"
        if noisy
        else ""
    )


def _interval(found: Paired, scale: float) -> str:
    low, high = (f"{scale * edge:+.2f}" for edge in (found.low, found.high))
    return f"{scale * found.value:+.2f} ({low} to {high})"


def _difference(score: Score | None, first: Score | None, found: Paired | None) -> str:
    if score is None or first is None or score.is_share != first.is_share:
        return ""
    scale = _scale(score)
    if found is not None:
        return _interval(found, scale)
    apart = difference(score, first)
    error = f" ± {scale * apart.error:.2f}" if apart.error is not None else ""
    return f"{scale * apart.value:+.2f}{error}"


def _mean(model: ModelResults, tasks: Sequence[str]) -> str:
    mean = model.mean(tasks)
    return "" if mean is None else f"{_PERCENT * mean:.2f}"


def _mean_difference(model: ModelResults, first: ModelResults, tasks: Sequence[str]) -> str:
    means = [one.mean(tasks) for one in (model, first)]
    return "" if None in means else f"{_PERCENT * (means[0] - means[1]):+.2f}"  # type: ignore[operator]
