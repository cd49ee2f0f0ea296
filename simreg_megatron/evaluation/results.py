# SPDX-License-Identifier: Apache-2.0
"""What an evaluation found: scores of models on tasks, written as JSON and read again."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from simreg_megatron.data.settings import write_json
from simreg_megatron.evaluation.errors import EvaluationError


@dataclass(frozen=True)
class Score:
    """One number of one model on one task, and its standard error.

    chance: what guessing, or giving always the same answer, would score; None where it is not known.
    is_share: of the questions, so from 0 to 1 and told in per cent; not so a perplexity or a correlation.
    """

    metric: str
    value: float
    error: float | None
    questions: int
    chance: float | None = None
    is_share: bool = True

    @property
    def is_noise(self) -> bool:
        """Whether guessing could have scored it: at most 1.96 standard errors of a guess above chance."""
        if self.chance is None or not self.is_share:
            return False
        guess = math.sqrt(self.chance * (1 - self.chance) / max(1, self.questions))
        return self.value <= self.chance + 1.96 * guess


@dataclass(frozen=True)
class Perplexity:
    """Cross-entropy on a prepared set: nats per token, over `tokens` of them in sequences of `seq_length`, from the
    first `features` of the final states.

    bytes: of the same text in UTF-8; None where no tokenizer lies beside the model.
    """

    loss: float
    tokens: int
    seq_length: int
    features: int
    bytes: int | None = None

    @property
    def bits_per_byte(self) -> float | None:
        """The same loss in a unit that does not depend on the tokenizer."""
        return None if not self.bytes else self.loss * self.tokens / self.bytes / math.log(2)

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


@dataclass(frozen=True)
class ModelResults:
    """All that was found of one model.

    state: of the files at `path` when they were read, so that others there are not taken for them; "" if not known.
    notes: lines of its export and of the set that its losses are of, for the reader of the scores.
    """

    name: str
    path: str
    scores: dict[str, Score] = field(default_factory=dict)
    perplexities: list[Perplexity] = field(default_factory=list)  # all features first, then prefixes of them
    state: str = ""
    notes: list[str] = field(default_factory=list)

    def mean(self, tasks: Sequence[str]) -> float | None:
        """The plain mean over tasks, as the paper's; None where one is missing, or is no share of its questions."""
        values = [self.scores[task].value for task in tasks if task in self.scores and self.scores[task].is_share]
        return sum(values) / len(values) if values and len(values) == len(tasks) else None


@dataclass(frozen=True)
class Difference:
    """Of a model from the first one; the error takes the two for independent."""

    value: float
    error: float | None


def difference(score: Score, first: Score) -> Difference:
    known = score.error is not None and first.error is not None
    error = math.hypot(score.error or 0.0, first.error or 0.0) if known else None
    return Difference(score.value - first.value, error)


def write(path: Path, models: Sequence[ModelResults], settings: Mapping[str, Any]) -> None:
    """All of it or nothing."""
    write_json(path, {"settings": dict(settings), "models": [asdict(model) for model in models]})


def read(path: Path) -> tuple[list[ModelResults], dict[str, Any]]:
    """The models and settings of a file that `write` made.

    Raises:
        EvaluationError: it is missing, or something else.
    """
    try:
        content = json.loads(path.read_text())
        models = [
            ModelResults(
                one["name"],
                one["path"],
                {task: Score(**score) for task, score in one["scores"].items()},
                [Perplexity(**held) for held in one["perplexities"]],
                one.get("state", ""),
                one.get("notes", []),
            )
            for one in content["models"]
        ]
        return models, content["settings"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EvaluationError(f"{path} holds no results of an evaluation ({error}): give another --output") from None
