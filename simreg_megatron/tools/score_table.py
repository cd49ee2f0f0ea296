# SPDX-License-Identifier: Apache-2.0
"""Read scores from the results of lm-evaluation-harness, and tabulate them and their differences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import stdev
from typing import Any, NamedTuple

from simreg_megatron.sentences import SentenceError

# The paper does not name its metrics. Its scores look like acc_norm where a task has one (36.5 on HellaSwag at 350M).
GROUPS = {
    "paper": {
        "arc_easy": "acc_norm", "arc_challenge": "acc_norm", "boolq": "acc", "hellaswag": "acc_norm",
        "openbookqa": "acc_norm", "piqa": "acc_norm", "mmlu": "acc", "winogrande": "acc", "sciq": "acc_norm",
    },
    "further": {
        "gsm8k": "exact_match", "drop": "f1", "race": "acc", "squadv2": "f1", "nq_open": "exact_match",
        "humaneval": "pass@1", "mbpp": "pass_at_1",
    },
}  # fmt: skip
Cell = tuple[float | None, float | None]  # a value and its standard error


class EvaluationError(SentenceError):
    """An evaluation that cannot be made."""


class Score(NamedTuple):
    """A task's score, its standard error (None if unknown), and its values by question if it is their mean."""

    value: float
    error: float | None
    questions: dict[tuple[str, int], float]


def score_of(found: Mapping[str, Any], task: str, metric: str) -> Score:
    """Read a task's (or group's) score; per cent if every question counts from 0 to 1."""
    results = found["results"].get(task, {})
    keys = [key for key in results if key.partition(",")[0] == metric or not metric]
    key = next((key for key in keys if "," in key and "_stderr," not in key), None)
    if key is None:
        there = ", ".join(sorted({key.partition(",")[0] for key in results if "," in key and "_stderr" not in key}))
        raise EvaluationError(
            f"{task} has no metric {metric}: give --tasks {task}:METRIC with one of {there or 'none'}"
        )
    metric, _, kind = key.partition(",")
    value, error = float(results[key]), results.get(f"{metric}_stderr,{kind}")
    questions = {
        (part, sample["doc_id"]): sample[metric]
        for part in parts_of(found, task)
        for sample in found.get("samples", {}).get(part, ())
        if sample.get("filter", kind) == kind and isinstance(sample.get(metric), int | float)
    }
    is_mean = bool(questions) and abs(sum(questions.values()) / len(questions) - value) < 1e-9
    scale = 100 if questions and all(0 <= each <= 1 for each in questions.values()) else 1
    return Score(
        scale * value,
        scale * error if isinstance(error, float) else None,
        {question: scale * each for question, each in questions.items()} if is_mean else {},
    )


def parts_of(found: Mapping[str, Any], task: str) -> Iterator[str]:
    """Yield the tasks of a group at any depth; of a task, itself."""
    parts = found.get("group_subtasks", {}).get(task, ())
    if not parts:
        yield task
    for part in parts:
        yield from parts_of(found, part)


def difference(score: Score, first: Score) -> Cell:
    """Return the difference and its standard error: paired by question where possible, as both answer the same ones."""
    value = score.value - first.value
    if len(score.questions) > 1 and score.questions.keys() == first.questions.keys():
        apart = [each - first.questions[question] for question, each in score.questions.items()]
        return value, stdev(apart) / len(apart) ** 0.5
    if score.error is None or first.error is None:
        return value, None
    return value, (score.error**2 + first.error**2) ** 0.5


def table(scores: Mapping[str, Mapping[str, Score]], paper: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Yield Markdown tables of the scores and of the differences from the first model, with standard errors."""
    first, *others = scores
    tasks = list(scores[first])
    has_mean = set(tasks) <= {*GROUPS["paper"], *GROUPS["further"]}  # of other tasks a score may be a perplexity
    header = f"| | {' | '.join([*tasks, *(['mean'] if has_mean else [])])} |\n{'| --- ' * (len(tasks) + 1 + has_mean)}|"

    def row(name: str, cells: list[Cell]) -> str:
        means = [mean(cells)] if has_mean else []
        return f"| {name} | {' | '.join(map(shown, [*cells, *means]))} |"

    yield header
    for name, found in scores.items():
        yield row(name, [(found[task].value, found[task].error) for task in tasks])
    for method, values in paper.items():
        yield row(f"paper: {method}", [(values.get(task), None) for task in tasks])
    if others:
        yield f"\nDifference from {first} (± a standard error, paired by question if the score is a mean over them):\n"
        yield header
    for name in others:
        yield row(name, [difference(scores[name][task], scores[first][task]) for task in tasks])


def mean(cells: list[Cell]) -> Cell:
    """Average over tasks; None if one of the values (or of the errors) is unknown."""
    values = [value for value, _ in cells if value is not None]
    errors = [error for _, error in cells if error is not None]
    error = sum(error**2 for error in errors) ** 0.5 / len(cells) if len(errors) == len(cells) else None
    return (sum(values) / len(cells), error) if len(values) == len(cells) else (None, None)


def shown(cell: Cell) -> str:
    value, error = cell
    return "" if value is None else f"{value:.2f}" if error is None else f"{value:.2f} ± {error:.2f}"
