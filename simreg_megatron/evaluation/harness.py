# SPDX-License-Identifier: Apache-2.0
"""One model through lm-evaluation-harness, zero-shot: the chosen metric of every task, with its standard error, its
value for every question, and what guessing would score."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from simreg_megatron.evaluation.answers import Answers
from simreg_megatron.evaluation.errors import EvaluationError
from simreg_megatron.evaluation.local_data import local_datasets
from simreg_megatron.evaluation.results import Score
from simreg_megatron.evaluation.tasks import FURTHER, PAPER, Choice

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Protocol:
    """How every model of a table is asked.

    Args:
        add_bos: begin every text with the begin-of-text token; as in training (Megatron's own data have none). None
            is no, and not said by the user.
        dtype: of the weights: float32, bfloat16 or float16.
        batch_size: requests at a time, or "auto".
        limit: only the first questions of each task: for a trial, never for a table.
        include: folder with more task definitions for the harness.
        task_data: folder with copies of data sets.
        offline: never use the network.
        allow_code: run what the model writes, for the tasks that need it.
    """

    add_bos: bool | None = None
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


class Found(NamedTuple):
    """By task: the score, and its parts [questions] where it is the mean of them."""

    scores: dict[str, Score]
    questions: dict[str, np.ndarray]


def evaluate(model: Path, choices: Sequence[Choice], protocol: Protocol) -> Found:
    """The scores of a Hugging Face model folder.

    Raises:
        EvaluationError: a task's data is missing, or it has no such metric.
    """
    import lm_eval
    import torch

    manager = task_manager(protocol.include)
    if protocol.allow_code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"
    with local_datasets(protocol.task_data, offline=protocol.offline):
        found = lm_eval.simple_evaluate(
            model="hf",
            model_args={
                "pretrained": str(model),
                "dtype": protocol.dtype,
                "add_bos_token": bool(protocol.add_bos),
                "use_safetensors": True,
            },
            tasks=[choice.name for choice in choices],
            num_fewshot=0,
            batch_size=_batch_size(protocol.batch_size),
            device=protocol.device or ("cuda" if torch.cuda.is_available() else "cpu"),  # the harness insists on cuda
            limit=protocol.limit,
            task_manager=manager,
            log_samples=True,
            confirm_run_unsafe_code=protocol.allow_code,
            random_seed=protocol.seed,
            numpy_random_seed=protocol.seed,
            torch_random_seed=protocol.seed,
            fewshot_random_seed=protocol.seed,
        )
    assert found is not None  # of rank 0, the only one
    answers = Answers(found)
    scores = {choice.name: _score(choice, found["results"], answers) for choice in choices}
    parts: dict[str, np.ndarray] = {}
    for choice in choices:
        parts |= answers.parts(choice, scores[choice.name])
    return Found(scores, parts)


@functools.cache
def task_manager(include: Path | None) -> Any:
    """The harness's index of its thousands of task files, and of those in a folder; made once, it takes seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=None if include is None else str(include))


def _batch_size(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def refuse_unknown(choices: Sequence[Choice], include: Path | None) -> None:
    """Before anything is loaded. A name that no definition mentions needs no index of all of them.

    Raises:
        EvaluationError: a task is not known, is a name of several with no score of its own, or is in another one.
    """
    others = [choice for choice in choices if choice not in (*PAPER, *FURTHER)]
    names = [choice.name for choice in others]
    if not names:
        return
    mentioned = _mentioned(include)
    unknown = [name for name in names if name not in mentioned]
    if not unknown:  # a word of another meaning, perhaps
        index = task_manager(include).task_index
        unknown = [name for name in names if name not in index]
    if unknown:
        near = _near(unknown[0], mentioned)
        told = f"{', '.join(unknown)}{f' (near it: {near})' if near else ''}"
        raise EvaluationError(
            f"lm-evaluation-harness {metadata.version('lm_eval')} knows no task {told}: see `lm_eval ls tasks`, or "
            "give its definition with --include DIR"
        )
    for choice in others:
        _refuse_without_score(choice, index[choice.name])
    _refuse_overlap(choices, index)


def _refuse_without_score(choice: Choice, entry: Any) -> None:
    """A tag, and a group that averages nothing, are names of several tasks and have no number of their own."""
    kind, config = entry.kind.name, entry.cfg or {}
    if kind not in ("TAG", "GROUP"):
        return
    told = config.get("aggregate_metric_list") or []
    metrics = [one["metric"] for one in (told if isinstance(told, list) else [told])]
    if choice.metric in metrics:
        return
    if metrics:
        raise EvaluationError(
            f"the group {choice.name} has no mean of {choice.metric} over its tasks: name one of {', '.join(metrics)} "
            f"as --tasks {choice.name}:METRIC, or name its tasks"
        )
    raise EvaluationError(
        f"{choice.name} is a {kind.lower()} of tasks and has no score of its own: name them, --tasks "
        f"{','.join(_parts(entry))}"
    )


def _parts(entry: Any) -> list[str]:
    """The names directly under a tag or a group; of a task, none."""
    kind, config = entry.kind.name, entry.cfg or {}
    if kind not in ("TAG", "GROUP"):
        return []
    parts = sorted(entry.tags) if kind == "TAG" else config.get("task", [])
    names = [part if isinstance(part, str) else part.get("task") or part.get("group") for part in parts]
    return [name for name in names if isinstance(name, str)]


def _tasks_under(name: str, index: Mapping[str, Any]) -> set[str]:
    parts = _parts(index[name]) if name in index else []
    return set().union(*(_tasks_under(part, index) for part in parts)) if parts else {name}


def _refuse_overlap(choices: Sequence[Choice], index: Mapping[str, Any]) -> None:
    """The harness would load all models and data first."""
    seen: dict[str, str] = {}
    for choice in choices:
        for task in sorted(_tasks_under(choice.name, index)):
            if (other := seen.setdefault(task, choice.name)) != choice.name:
                raise EvaluationError(
                    f"--tasks names {other} and {choice.name}, and the task {task} is in both: the harness asks it "
                    "once a run, so take them one after the other, each with an --output of its own"
                )


def refuse_unknown_metrics(choices: Sequence[Choice], protocol: Protocol) -> None:
    """Before a model answers for hours. Only a task's data tell all of its metrics, so tasks of ours are passed over.

    Raises:
        EvaluationError: a task has no such metric.
    """
    for choice in choices:
        ours = choice in (*PAPER, *FURTHER)
        if not ours and choice.metric not in (there := _metrics_of(choice.name, protocol)):
            raise EvaluationError(_no_metric(choice, there))


@functools.cache
def _metrics_of(name: str, protocol: Protocol) -> frozenset[str]:
    """Of a task, or of all tasks of a group; once for all models, since it reads the task's data."""
    with local_datasets(protocol.task_data, offline=protocol.offline):
        tasks = task_manager(protocol.include).load([name])["tasks"].values()
    return frozenset(metric for task in tasks for metric in task.aggregation())


def _no_metric(choice: Choice, there: Iterable[str]) -> str:
    return (
        f"the task {choice.name} has no metric {choice.metric}: name one of {', '.join(sorted(there))} as "
        f"--tasks {choice.name}:METRIC"
    )


def _near(name: str, known: set[str]) -> str:
    """Names with the same beginning and about as long, which are quickly compared."""
    alike = sorted(word for word in known if word[:1] == name[:1] and abs(len(word) - len(name)) <= 3)
    return ", ".join(get_close_matches(name, alike, n=3, cutoff=0.75))


_WORD = re.compile(r"[^\s\"'`,\[\]{}]+")
_DEFINITIONS = ("", ".yaml", ".yml")  # what others include has no ending


@functools.cache
def _mentioned(include: Path | None) -> set[str]:
    """Every word in the harness's task definitions and in those of a folder: much faster than reading them as YAML."""
    spec = find_spec("lm_eval")
    assert spec is not None and spec.submodule_search_locations
    folders = [Path(spec.submodule_search_locations[0]) / "tasks", *filter(None, [include])]
    files = (path for root in folders for path in root.rglob("*") if path.suffix in _DEFINITIONS and path.is_file())
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in files)
    return {word.rstrip(":") for text in texts for word in _WORD.findall(text)}


def _score(choice: Choice, results: Mapping[str, Mapping[str, Any]], answers: Answers) -> Score:
    """Metrics are keyed `metric,filter`; of several filters the first one is the task's main one."""
    found = results[choice.name]
    keys = [key for key in found if key.partition(",")[0] == choice.metric]
    if not keys:
        raise EvaluationError(
            _no_metric(choice, {key.partition(",")[0] for key in found if "," in key and "_stderr" not in key})
        )
    key = keys[0]
    metric, _, filtered = key.partition(",")
    error = found.get(f"{metric}_stderr,{filtered}")
    return Score(
        metric=metric if filtered in ("none", "") else f"{metric} ({filtered})",
        value=choice.scale * float(found[key]),
        error=choice.scale * error if isinstance(error, float) else None,
        questions=answers.number(choice.name),
        chance=answers.chance(choice),
        is_share=answers.is_share(choice),
    )
