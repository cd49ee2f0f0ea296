# SPDX-License-Identifier: Apache-2.0
"""Which tasks are run, and which of the several numbers of each goes into the table.

The paper (arXiv 2605.08809, appendix A.1) names its tasks and not their metrics. The magnitudes of its tables suggest
acc_norm where a task has it (LLaMA-350M at 36.5 on HellaSwag and 28.4 on OpenBookQA), else acc: a guess, and
`NAME:METRIC` chooses otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from simreg_megatron.evaluation.errors import EvaluationError


@dataclass(frozen=True)
class Choice:
    """A task of lm-evaluation-harness, by its name there, and the metric that is tabled."""

    name: str
    metric: str = "acc"
    runs_code: bool = False  # executes what the model wrote
    scale: float = 1.0  # by which the harness's number is multiplied to lie between 0 and 1


PAPER = (
    Choice("arc_easy", "acc_norm"),
    Choice("arc_challenge", "acc_norm"),
    Choice("boolq", "acc"),
    Choice("hellaswag", "acc_norm"),
    Choice("openbookqa", "acc_norm"),
    Choice("piqa", "acc_norm"),
    Choice("mmlu", "acc"),
    Choice("winogrande", "acc"),
    Choice("sciq", "acc_norm"),
)
FURTHER = (
    Choice("gsm8k", "exact_match"),
    Choice("drop", "f1"),
    Choice("race", "acc"),
    Choice("squadv2", "f1", scale=0.01),
    Choice("nq_open", "exact_match"),
    Choice("humaneval", "pass@1", runs_code=True),
    Choice("mbpp", "pass_at_1", runs_code=True),
)
GROUPS = {"paper": PAPER, "further": FURTHER}
_KNOWN = {choice.name: choice for group in GROUPS.values() for choice in group}


def choose(words: Sequence[str], *, allow_code: bool) -> list[Choice]:
    """Tasks by name, `NAME:METRIC`, or group (paper, further), in the order given.

    Without `allow_code`, tasks of a group that run generated code are left out.

    Raises:
        EvaluationError: nothing is left, a task is named twice, or one that runs code is named without leave.
    """
    chosen: list[Choice] = []
    for word in words:
        if word in GROUPS:
            chosen += [choice for choice in GROUPS[word] if allow_code or not choice.runs_code]
            continue
        name, _, metric = word.partition(":")
        choice = _KNOWN.get(name, Choice(name))
        if choice.runs_code and not allow_code:
            raise EvaluationError(
                f"{name} runs the code that the model writes, on this machine: --allow-code-execution if you mean it"
            )
        chosen.append(replace(choice, metric=metric) if metric else choice)
    names = [choice.name for choice in chosen]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise EvaluationError(f"--tasks names {', '.join(twice)} twice: once each")
    if not chosen:
        raise EvaluationError("--tasks names no task")
    return chosen
