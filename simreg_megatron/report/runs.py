# SPDX-License-Identifier: Apache-2.0
"""One training run as its TensorBoard events tell it: every scalar that was logged, by step, and the settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simreg_megatron.sentences import SentenceError

# Written by Megatron itself; ITERATION_TIME only under --log-timers-to-tensorboard.
TRAIN_LOSS = "lm loss"
VALIDATION_LOSS = "lm loss validation"
FIRST_OF_SEVERAL = "lm loss validation-0"  # its name for the first set, where there are several
ITERATION_TIME = "iteration-time"

# Written by the plugin, as means over a log interval.
SIMREG_LOSS = "simreg loss"
POSITIVE_COSINE = "simreg positive cosine"
NEGATIVE_COSINE = "simreg negative cosine"
ISOTROPY = "simreg isotropy"
MARGIN = "simreg margin"  # what the tags of all margins begin with


_BY_SAMPLES = " vs samples"
TEXT = "/text_summary"  # what TensorBoard adds to the tags of texts


class ReportError(SentenceError):
    """Something to report on is missing or unreadable; the message is the one sentence the user reads."""


class Series(NamedTuple):
    """One scalar over the run: steps [n] rising, values [n]."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]


@dataclass(frozen=True)
class Run:
    """A run's name, its scalars by tag, and Megatron's arguments as text where it wrote them beside the scalars."""

    name: str
    scalars: dict[str, Series] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def tokens_per_step(self) -> int | None:
        """None where the run does not tell, or where its batch grew on the way."""
        length, batch = self.settings.get("seq_length", ""), self.settings.get("global_batch_size", "")
        grows = self.settings.get("rampup_batch_size", "None") not in ("", "None")
        numbers = all(text.isdecimal() and len(text) < 19 for text in (length, batch))
        return int(length) * int(batch) if numbers and not grows else None

    def last(self, tag: str) -> float | None:
        """The value at the last step; None where the tag was never logged."""
        series = self.scalars.get(tag)
        return float(series.values[-1]) if series else None

    def mean_of_end(self, tag: str, *, fraction: float = 0.1) -> float | None:
        """The mean over the last `fraction` of the steps, steadier than one log interval; None as in `last`."""
        series = self.scalars.get(tag)
        if series is None:
            return None
        start = series.steps[-1] * (1 - fraction)
        return float(series.values[series.steps > start].mean())

    def median(self, tag: str) -> float | None:
        """The median over the run, which start-up and a busy moment do not move; None as in `last`."""
        series = self.scalars.get(tag)
        return float(np.median(series.values)) if series else None


def read_run(folder: str | Path, *, name: str | None = None) -> Run:
    """Read every scalar below a run's TensorBoard folder, and the settings that Megatron wrote there.

    Args:
        folder: where the event files lie, what Megatron got as --tensorboard-dir.
        name: what figures and tables call the run; the folder's own name by default.

    Raises:
        ReportError: the folder is missing, or holds no scalar.
    """
    # Imported here: TensorBoard takes a second to load, and the figures do not need it.
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    folder = Path(folder)
    try:
        is_there = folder.is_dir()
        if is_there:
            next(folder.iterdir(), None)
    except OSError as error:
        raise ReportError(f"{folder} cannot be read ({error.strerror}): mend the rights there") from None
    if not is_there:
        raise ReportError(f"{folder} is not a folder: give the run's output folder or its --tensorboard-dir")
    with readable(folder):
        events = EventAccumulator(str(folder), size_guidance={SCALARS: 0})  # 0 keeps every point
        events.Reload()
        tags = events.Tags()
        scalars = _by_step({tag: events.Scalars(tag) for tag in tags["scalars"]})
        settings = {tag.removesuffix(TEXT): last_text(events, tag) for tag in tags["tensors"] if tag.endswith(TEXT)}
    if not scalars:
        raise ReportError(f"{folder} holds no TensorBoard scalars: the run logged nothing yet, or elsewhere")
    return Run(name=name or folder.name, scalars=scalars, settings=settings)


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    """TensorBoard reads a damaged record as far as it goes, and raises what it meets there: a sentence of it."""
    try:
        yield
    except Exception as error:
        raise ReportError(
            f"{folder} holds a damaged TensorBoard file ({type(error).__name__}: {error}): copy it again from where "
            "the run wrote it"
        ) from None


def own_name(path: Path) -> str:
    """What a run is called that nobody has named: after its output folder, or its table."""
    path = path.resolve()
    return path.parent.name if path.name == "tensorboard" else path.stem if path.suffix == ".csv" else path.name


def last_text(events: Any, tag: str) -> str:
    """What was written last under the tag of a text."""
    words = events.Tensors(tag)[-1].tensor_proto.string_val
    return words[0].decode(errors="replace") if words else ""


def _by_step(events: dict[str, list[Any]]) -> dict[str, Series]:
    """What a run logged before it was stopped, and has not reached again since it was resumed, counts no more."""
    in_order = {tag: sorted(values, key=lambda event: event.wall_time) for tag, values in events.items()}
    found = {}
    for counts_samples in (True, False):  # Megatron logs some values by step and again by samples
        tags = [tag for tag in events if tag.endswith(_BY_SAMPLES) is counts_samples]
        restarts = sorted(restart for tag in tags for restart in _restarts(in_order[tag]))
        times = np.array([time for time, _ in restarts])
        first_steps = np.array([step for _, step in restarts], dtype=np.float64)
        smallest_from = np.append(np.minimum.accumulate(first_steps[::-1])[::-1], np.inf)  # of this restart and later
        for tag in tags:
            later = np.searchsorted(times, [event.wall_time for event in in_order[tag]], side="right")
            pairs = zip(in_order[tag], smallest_from[later], strict=True)
            found[tag] = _one_value_per_step([event for event, step in pairs if event.step <= step])
    return {tag: found[tag] for tag in events if len(found[tag].steps)}


def _restarts(events: list[Any]) -> Iterator[tuple[float, int]]:
    """When a tag's steps went back, and to which."""
    yield from ((after.wall_time, after.step) for before, after in pairwise(events) if after.step < before.step)


def _one_value_per_step(events: list[Any]) -> Series:
    """The last value written for each step: Megatron evaluates twice at its final one."""
    latest = {event.step: event.value for event in events}
    steps = sorted(latest)
    return Series(np.array(steps, dtype=np.int64), np.array([latest[step] for step in steps], dtype=np.float64))
