# SPDX-License-Identifier: Apache-2.0
"""Two models on the same questions or documents: the difference, and how sure it is.

    difference = sum_i (b_i - a_i) / sum_i w_i,    its interval: the same of resampled i (bootstrap, percentiles)

A question that both answer rightly, or both wrongly, says nothing and adds no noise; the errors of two independent
scores would count it. w is 1 for questions, and the tokens or bytes of a document for losses.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from simreg_megatron.data.indexed import whole_file
from simreg_megatron.evaluation.errors import EvaluationError

if TYPE_CHECKING:
    import numpy as np

DRAWS = 2000
_AT_A_TIME = 4_000_000  # numbers that are resampled at once


@dataclass(frozen=True)
class Paired:
    """low, high: the 95 % interval; number: of what was resampled; draws: the difference in each resample [DRAWS]."""

    value: float
    low: float
    high: float
    number: int
    draws: np.ndarray

    @property
    def is_clear(self) -> bool:
        return self.low > 0 or self.high < 0


def paired(other: np.ndarray, first: np.ndarray, weights: np.ndarray | None = None, *, name: str = "") -> Paired | None:
    """other minus first, question by question [n]; None where they are not of the same questions, or of fewer than two.

    Args:
        other, first: scores, or sums of losses over documents.
        weights: what the sums are of; 1 each by default.
        name: what is resampled: others are resampled otherwise, even if there are as many of them.
    """
    import numpy as np

    if other.shape != first.shape or len(first) < 2:
        return None
    apart = other - first
    weights = np.ones_like(apart) if weights is None else weights
    draw = np.random.default_rng(zlib.crc32(name.encode()))
    draws = []
    each = max(1, _AT_A_TIME // len(apart))
    for start in range(0, DRAWS, each):
        chosen = draw.integers(0, len(apart), (min(each, DRAWS - start), len(apart)))
        draws.append(apart[chosen].sum(axis=1) / weights[chosen].sum(axis=1))
    return _of_draws(float(apart.sum() / weights.sum()), np.concatenate(draws), len(apart))


def mean_of(several: Sequence[Paired]) -> Paired:
    """Of the plain mean over tasks, whose questions are resampled each for itself."""
    import numpy as np

    value = sum(each.value for each in several) / len(several)
    return _of_draws(value, np.mean([each.draws for each in several], axis=0), sum(each.number for each in several))


def _of_draws(value: float, draws: np.ndarray, number: int) -> Paired:
    import numpy as np

    low, high = np.quantile(draws, (0.025, 0.975))
    return Paired(value, float(low), float(high), number, draws)


# ---- what is paired, kept beside the results -------------------------------------------------------------------------

LOSS, TOKENS, BYTES = "document loss", "document tokens", "document bytes"  # sums over each document's targets
_TASK, _PART = "task ", " / "


def task_of(name: str) -> str:
    """The name of the scores of a task's questions."""
    return f"{_TASK}{name}"


def part_of(group: str, task: str) -> str:
    """The name of the scores of a task, of a group whose score is the mean over its tasks."""
    return f"{_TASK}{group}{_PART}{task}"


def keep(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Scores by task [questions], and sums by document."""
    import numpy as np

    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as stream:
        np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]


def kept(path: Path) -> dict[str, np.ndarray]:
    """All arrays that were kept; none where there is no such file.

    Raises:
        EvaluationError: the file is damaged.
    """
    import numpy as np

    if not path.is_file():
        return {}
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise EvaluationError(
            f"{path} is damaged ({error}): copy it again from where it was made, or give another --output"
        ) from None


@dataclass(frozen=True)
class Pairs:
    """One model against the first: by task, and of the loss in nats per token and in bits per byte."""

    tasks: dict[str, Paired]
    nats_per_token: Paired | None
    bits_per_byte: Paired | None


def pairs_of(other: dict[str, np.ndarray], first: dict[str, np.ndarray]) -> Pairs:
    import numpy as np

    shared = [key for key in first if key in other]
    found: dict[str, list[Paired | None]] = {}
    for key in first:
        if key.startswith(_TASK):
            same = paired(other[key], first[key], name=key) if key in other else None
            found.setdefault(key.removeprefix(_TASK).partition(_PART)[0], []).append(same)
    whole = {name: [each for each in parts if each is not None] for name, parts in found.items()}
    tasks = {name: mean_of(parts) for name, parts in whole.items() if len(parts) == len(found[name])}
    nats = bits = None
    if LOSS in shared and np.array_equal(other[TOKENS], first[TOKENS]):
        nats = paired(other[LOSS], first[LOSS], first[TOKENS])
        if BYTES in shared and first[BYTES].sum() > 0:
            bits = paired(other[LOSS] / np.log(2), first[LOSS] / np.log(2), first[BYTES])
    return Pairs(tasks, nats, bits)
