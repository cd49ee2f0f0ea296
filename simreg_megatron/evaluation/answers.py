# SPDX-License-Identifier: Apache-2.0
"""What the harness logged of each question: the parts that a score is the mean of, and what guessing would score."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from simreg_megatron.evaluation import paired
from simreg_megatron.evaluation.results import Score
from simreg_megatron.evaluation.tasks import FURTHER, PAPER, Choice

if TYPE_CHECKING:
    import numpy as np


class Answers:
    """The questions of each task, and of a group those of all its tasks, as the harness logged them."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        self._counts = {name: int(number["effective"]) for name, number in found.get("n-samples", {}).items()}
        self._groups = found.get("group_subtasks", {})
        self._kinds = {name: config.get("output_type") for name, config in found.get("configs", {}).items()}
        self._samples = found.get("samples", {})

    def _tasks(self, name: str) -> list[str]:
        """The tasks of a group, at whatever depth; of a task, itself."""
        parts = [] if name in self._counts else self._groups.get(name, ())
        return [task for part in parts for task in self._tasks(part)] if parts else [name]

    def number(self, name: str) -> int:
        return sum(self._counts.get(task, 0) for task in self._tasks(name))

    def _of(self, task: str, metric: str) -> list[Mapping[str, Any]]:
        """In one order for every model; of the first filter that has the metric, which is the task's main one."""
        logged = [sample for sample in self._samples.get(task, ()) if metric in sample]
        main = logged[0].get("filter") if logged else None
        return sorted((one for one in logged if one.get("filter") == main), key=lambda sample: sample["doc_id"])

    def _of_all(self, choice: Choice) -> list[Mapping[str, Any]]:
        return [sample for task in self._tasks(choice.name) for sample in self._of(task, choice.metric)]

    def is_share(self, choice: Choice) -> bool:
        """Whether the score is a share of the questions: each counts between nothing and one whole."""
        if choice in (*PAPER, *FURTHER):
            return True
        values = [sample[choice.metric] for sample in self._of_all(choice)]
        return bool(values) and all(isinstance(value, int | float) and 0 <= value <= 1 for value in values)

    def parts(self, choice: Choice, score: Score) -> dict[str, np.ndarray]:
        """The metric of each question [questions], if its mean is the score; of a group whose score is the mean over
        its tasks, by task. Nothing where it is neither, as squadv2's and a perplexity."""
        import numpy as np

        by_task = {
            task: [one[choice.metric] for one in self._of(task, choice.metric)] for task in self._tasks(choice.name)
        }
        values = [value for each in by_task.values() for value in each]
        if len(values) != score.questions or not all(isinstance(value, int | float) for value in values):
            return {}
        parts = {task: choice.scale * np.array(each, dtype=np.float64) for task, each in by_task.items() if each}
        whole = {paired.task_of(choice.name): np.concatenate(list(parts.values()))} if parts else {}
        for found in (whole, {paired.part_of(choice.name, task): each for task, each in parts.items()}):
            if found and math.isclose(np.mean([each.mean() for each in found.values()]), score.value, abs_tol=1e-9):
                return found
        return {}

    def chance(self, choice: Choice) -> float | None:
        """What guessing scores in a multiple choice; where one and the same answer is right clearly more often, as in
        boolq, what that answer scores."""
        if {self._kinds.get(task) for task in self._tasks(choice.name)} != {"multiple_choice"}:
            return None
        logged = self._of_all(choice)
        if not logged or choice.metric not in ("acc", "acc_norm"):
            return None
        guess = sum(1 / len(sample["filtered_resps"]) for sample in logged) / len(logged)
        right = Counter(filter(None, map(_right_answer, logged)))
        share = max(right.values(), default=0) / len(logged)
        is_lopsided = share - guess > 3 * math.sqrt(guess * (1 - guess) / len(logged))
        return share if is_lopsided else guess


def _right_answer(sample: Mapping[str, Any]) -> str:
    """Its text; "" where the place of the right one is not logged."""
    place, asked = sample.get("target"), sample.get("arguments", ())
    return str(asked[place][1]) if isinstance(place, int) and 0 <= place < len(asked) else ""
