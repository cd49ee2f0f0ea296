# SPDX-License-Identifier: Apache-2.0
"""Runs while they train, side by side in a terminal: what their TensorBoard files say so far.

Only files are read, so it works on a login node and over ssh, and a run never notices.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from simreg_megatron.report import runs
from simreg_megatron.report.arms import name_and_path
from simreg_megatron.report.runs import ReportError

_RECENT = 20  # log lines whose pace counts
_LATE = 5  # log intervals of silence after which a run is told to be silent
_SETTINGS = ("train_iters", "seq_length", "global_batch_size", "rampup_batch_size")
_VALUES = (
    ("lm loss", (runs.TRAIN_LOSS,), ".4f"),
    ("validation loss", (runs.VALIDATION_LOSS, runs.FIRST_OF_SEVERAL), ".4f"),
    ("simreg loss", (runs.SIMREG_LOSS,), ".4g"),
    ("cosine, same label", (runs.POSITIVE_COSINE,), ".3f"),
    ("cosine, other labels", (runs.NEGATIVE_COSINE,), ".3f"),
    ("isotropy", (runs.ISOTROPY,), ".3f"),
    ("clipped parameters", ("adagc clipped share",), ".1%"),
    ("gradient norm", ("grad-norm",), ".3f"),
    ("learning rate", ("learning-rate",), ".3g"),
)


class State(NamedTuple):
    """Of a run, as far as its files tell."""

    name: str
    step: int = 0
    steps: int | None = None  # of the whole training
    values: dict[str, float] = {}  # noqa: RUF012  (never changed)
    seconds_per_step: float | None = None
    tokens_per_step: int | None = None
    silent_for: float = 0.0  # seconds since the last line of its log
    seconds_per_line: float | None = None

    @property
    def is_done(self) -> bool:
        return self.steps is not None and self.step >= self.steps

    @property
    def seconds_left(self) -> float | None:
        if self.steps is None or self.seconds_per_step is None:
            return None
        return max(0, self.steps - self.step) * self.seconds_per_step


class Watched:
    """One run's files, of which each look reads what is new."""

    def __init__(self, word: str) -> None:
        from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

        name, path = name_and_path(word)
        folder = events_of(path)
        self.name = name or runs.own_name(path)
        self._folder = folder
        self._events: Any = EventAccumulator(str(folder), size_guidance={SCALARS: 0})  # 0 keeps every point

    def look(self, now: float) -> State:
        with runs.readable(self._folder):
            self._events.Reload()
        tags = self._events.Tags()
        lines = self._in_order(runs.TRAIN_LOSS) if runs.TRAIN_LOSS in tags["scalars"] else []
        settings = {name: self._setting(name, tags["tensors"]) for name in _SETTINGS}
        newest = {tag: self._in_order(tag)[-1] for tag in tags["scalars"]}
        pace = _pace([(line.step, line.wall_time) for line in lines])
        lasts = [newest[tag] for tag in (runs.TRAIN_LOSS, runs.VALIDATION_LOSS, runs.FIRST_OF_SEVERAL) if tag in newest]
        last = max(lasts, key=lambda event: event.wall_time, default=None)
        length = settings["train_iters"]
        return State(
            self.name,
            step=last.step if last else 0,
            steps=int(length) if length.isdecimal() else None,
            values={tag: event.value for tag, event in newest.items()},
            seconds_per_step=pace,
            tokens_per_step=runs.Run(self.name, settings=settings).tokens_per_step,
            silent_for=now - last.wall_time if last else 0.0,
            seconds_per_line=_median_apart([line.wall_time for line in lines]),
        )

    def _in_order(self, tag: str) -> list[Any]:
        """Values of a tag as they were logged: TensorBoard reads several files of a run in the order of their names."""
        return sorted(self._events.Scalars(tag), key=lambda event: event.wall_time)

    def _setting(self, name: str, texts: Sequence[str]) -> str:
        """One of Megatron's arguments, which it writes beside its scalars; "" where it did not."""
        tag = name + runs.TEXT
        return runs.last_text(self._events, tag) if tag in texts else ""


def events_of(path: Path) -> Path:
    """Where the event files of a run lie: below its output folder, the newest run's where there are several.

    Raises:
        ReportError: no event file is there.
    """
    files = list(path.rglob("events.out.tfevents.*")) if path.is_dir() else []
    if not files:
        raise ReportError(f"{path} has no TensorBoard files below it: name the output folder of a run that logs there")
    return max(files, key=lambda file: file.stat().st_mtime).parent


def watch(
    words: Sequence[str], *, every: float, once: bool, console: Console, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Show the runs until all are done, or until Ctrl-C.

    Args:
        words: `PATH` or `NAME=PATH` each.
        every: seconds between two looks.
        once: look once and return.

    Raises:
        ReportError: a path holds no run.
    """
    watched = [Watched(word) for word in words]
    states = [run.look(time.time()) for run in watched]
    if once:
        console.print(table_of(states))
        return
    with Live(table_of(states), console=console, auto_refresh=False) as live:
        while not all(state.is_done for state in states):
            sleep(every)
            states = [run.look(time.time()) for run in watched]
            live.update(table_of(states), refresh=True)


def table_of(states: Sequence[State]) -> Table:
    """A column a run; values that no run has logged get no line."""
    table = Table("", *(escape(state.name) for state in states), box=None)
    table.add_row("step", *(_step(state) for state in states))
    for title, tags, form in _VALUES:
        found = [next((state.values[tag] for tag in tags if tag in state.values), None) for state in states]
        if any(value is not None for value in found):
            table.add_row(title, *("" if value is None else format(value, form) for value in found))
    table.add_row("seconds a step", *(_number(state.seconds_per_step, ".3g") for state in states))
    table.add_row("tokens a second", *(_number(_tokens_per_second(state), ",.0f") for state in states))
    table.add_row("time left", *(_left(state) for state in states))
    return table


def _pace(lines: Sequence[tuple[int, float]]) -> float | None:
    """Seconds a step: the median over the last log lines, which a pause or a resumed run does not move."""
    pairs = itertools.pairwise(lines[-_RECENT - 1 :])
    found = [(after[1] - before[1]) / (after[0] - before[0]) for before, after in pairs if after[0] > before[0]]
    return float(np.median(found)) if found else None


def _median_apart(times: Sequence[float]) -> float | None:
    """Seconds between the last log lines."""
    found = np.diff(times[-_RECENT - 1 :])
    return float(np.median(found)) if len(found) else None


def _tokens_per_second(state: State) -> float | None:
    if not (state.tokens_per_step and state.seconds_per_step):
        return None
    return state.tokens_per_step / state.seconds_per_step


def _step(state: State) -> str:
    return f"{state.step:,}" + (f" of {state.steps:,}" if state.steps else "")


def _left(state: State) -> str:
    if state.is_done:
        return "done"
    if not state.step:
        return "nothing logged yet"
    interval = max(60.0, _LATE * (state.seconds_per_line or 0.0))
    if state.silent_for > interval:
        return f"silent for {duration(state.silent_for)}"
    return "" if state.seconds_left is None else duration(state.seconds_left)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def duration(seconds: float) -> str:
    """Such as 45 s, 12 min, 3 h 05 min, 2 d 4 h."""
    minutes, hours, days = seconds / 60, seconds / 3600, seconds / 86400
    if seconds < 60:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes:.0f} min"
    if hours < 24:
        return f"{int(hours)} h {int(minutes) % 60:02d} min"
    return f"{int(days)} d {int(hours) % 24} h"
