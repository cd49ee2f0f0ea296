# SPDX-License-Identifier: Apache-2.0
"""Progress over a whole plan: a bar with the time left in a terminal, a line every ten minutes elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from simreg_megatron.reproduce.local import Progress
from simreg_megatron.reproduce.plan import Plan
from simreg_megatron.reproduce.runs import Entry, Run
from simreg_megatron.reproduce.store import Store

_SECONDS_BETWEEN_NOTES = 600.0


@contextmanager
def shown(
    console: Console, plan: Plan, runs: Sequence[Run], entries: Sequence[Entry], store: Store,
    seconds: Mapping[str, float], jobs: int,
) -> Iterator[Progress]:  # fmt: skip
    """A `Progress` that is on the screen, and that writes the tables anew whenever a run has ended."""
    bars = Bars(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[told]}"), TimeElapsedColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    screen = _Screen(console, bars, bars.add_task(plan.name, total=None, told=""), plan, entries, store, seconds, jobs)
    with bars:
        yield Progress(runs, screen.show)


class _Screen:
    def __init__(
        self, console: Console, bars: Bars, task: TaskID, plan: Plan, entries: Sequence[Entry], store: Store,
        seconds: Mapping[str, float], jobs: int,
    ) -> None:  # fmt: skip
        self._console, self._bars, self._task = console, bars, task
        self._plan, self._entries, self._store = plan, entries, store
        self._seconds, self._jobs = seconds, jobs
        self._ended = -1
        self._noted = time.monotonic()

    def show(self, progress: Progress) -> None:
        told = self._told(progress)
        work = sum(self._seconds[run.size] * run.steps for run in progress.runs)
        self._bars.update(self._task, total=work, completed=work - self._work_left(progress), told=told)
        now = time.monotonic()
        if len(progress.ended) != self._ended:
            self._store.write_tables(self._plan, self._entries)
        has_news = len(progress.ended) != self._ended or now - self._noted > _SECONDS_BETWEEN_NOTES
        if has_news and not self._console.is_terminal:
            self._noted = now
            self._console.print(time.strftime("%H:%M  ") + told, markup=False)
        self._ended = len(progress.ended)

    def _told(self, progress: Progress) -> str:
        minutes = self._work_left(progress) / self._jobs / 60
        left = f"{minutes / 60:.1f} h" if minutes > 90 else f"{minutes:.0f} min"
        return f"{len(progress.ended)} of {len(progress.runs)} runs, about {left} left"

    def _work_left(self, progress: Progress) -> float:
        ended = set(progress.ended)
        left = (run.steps - progress.steps.get(run, 0) for run in progress.runs if run not in ended)
        sizes = (run.size for run in progress.runs if run not in ended)
        return sum(self._seconds[size] * steps for size, steps in zip(sizes, left, strict=True))
