# SPDX-License-Identifier: Apache-2.0
"""One model through lm-evaluation-harness, zero-shot: the chosen metric of every task, with its standard error."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from simreg_megatron.evaluation.errors import EvaluationError
from simreg_megatron.evaluation.local_data import local_datasets
from simreg_megatron.evaluation.results import Score
from simreg_megatron.evaluation.tasks import Choice


@dataclass(frozen=True)
class Protocol:
    """How every model of a table is asked.

    Args:
        add_bos: begin every text with the begin-of-text token; as in training (Megatron's own data have none).
        dtype: of the weights: float32, bfloat16 or float16.
        batch_size: requests at a time, or "auto".
        limit: only the first questions of each task: for a trial, never for a table.
        include: folder of further task definitions of the harness.
        task_data: folder with copies of data sets.
        offline: never ask the network.
        allow_code: run what the model writes, for the tasks that need it.
    """

    add_bos: bool = False
    dtype: str = "bfloat16"
    device: str | None = None
    batch_size: str = "auto"
    limit: int | None = None
    include: Path | None = None
    task_data: Path | None = None
    offline: bool = False
    allow_code: bool = False
    seed: int = 1234

    def shown(self) -> dict[str, Any]:
        """What a reader of the results must know."""
        return {
            "few-shot examples": 0,
            "begin-of-text token": "added" if self.add_bos else "none",
            "dtype": self.dtype,
            "limit": self.limit,
            "seed": self.seed,
            "lm-evaluation-harness": metadata.version("lm_eval"),
            "transformers": metadata.version("transformers"),
            "torch": metadata.version("torch"),
        }


def evaluate(model: Path, choices: Sequence[Choice], protocol: Protocol) -> dict[str, Score]:
    """The scores of a Hugging Face model folder, by task.

    Raises:
        EvaluationError: a task is not known, its data is missing, or it has no such metric.
    """
    import lm_eval
    import torch

    manager = task_manager(protocol.include)
    _refuse_unknown(choices, manager.all_tasks)
    if protocol.allow_code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"
    with local_datasets(protocol.task_data, offline=protocol.offline):
        found = lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(model), "dtype": protocol.dtype, "add_bos_token": protocol.add_bos},
            tasks=[choice.name for choice in choices],
            num_fewshot=0,
            batch_size=_batch_size(protocol.batch_size),
            device=protocol.device or ("cuda" if torch.cuda.is_available() else "cpu"),  # the harness insists on cuda
            limit=protocol.limit,
            task_manager=manager,
            log_samples=False,
            confirm_run_unsafe_code=protocol.allow_code,
            random_seed=protocol.seed,
            numpy_random_seed=protocol.seed,
            torch_random_seed=protocol.seed,
            fewshot_random_seed=protocol.seed,
        )
    assert found is not None  # of rank 0, the only one
    counts = {name: int(number["effective"]) for name, number in found.get("n-samples", {}).items()}
    return {
        choice.name: _score(choice, found["results"], counts, found.get("group_subtasks", {})) for choice in choices
    }


@functools.cache
def task_manager(include: Path | None) -> Any:
    """The harness's index of its thousands of task files, and of those in a folder; made once, it takes seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=None if include is None else str(include))


def _batch_size(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _refuse_unknown(choices: Sequence[Choice], known: Sequence[str]) -> None:
    unknown = [choice.name for choice in choices if choice.name not in set(known)]
    if unknown:
        raise EvaluationError(
            f"lm-evaluation-harness {metadata.version('lm_eval')} knows no task {', '.join(unknown)}: see "
            "`lm_eval ls tasks`, or give its definition with --include DIR"
        )


def _score(
    choice: Choice,
    results: Mapping[str, Mapping[str, Any]],
    counts: Mapping[str, int],
    groups: Mapping[str, Sequence[str]],
) -> Score:
    """Metrics are keyed `metric,filter`; of several filters the first one is the task's main one."""
    found = results[choice.name]
    keys = [key for key in found if key.partition(",")[0] == choice.metric]
    if not keys:
        there = sorted({key.partition(",")[0] for key in found if "," in key and "_stderr" not in key})
        raise EvaluationError(
            f"the task {choice.name} has no metric {choice.metric}: name one of {', '.join(there)} as "
            f"--tasks {choice.name}:METRIC"
        )
    key = keys[0]
    metric, _, filtered = key.partition(",")
    error = found.get(f"{metric}_stderr,{filtered}")
    return Score(
        metric=metric if filtered in ("none", "") else f"{metric} ({filtered})",
        value=choice.scale * float(found[key]),
        error=choice.scale * error if isinstance(error, float) else None,
        questions=_questions(choice.name, counts, groups),
    )


def _questions(name: str, counts: Mapping[str, int], groups: Mapping[str, Sequence[str]]) -> int:
    """Of a group, those of all its tasks."""
    if name in counts:
        return counts[name]
    return sum(_questions(task, counts, groups) for task in groups.get(name, ()))
