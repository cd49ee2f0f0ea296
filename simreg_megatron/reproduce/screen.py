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
from simreg_megatron.reproduce.speed import until_all_end
from simreg_megatron.reproduce.store import Store

_SECONDS_BETWEEN_NOTES = 600.0


@contextmanager
def shown(
    console: Console, plan: Plan, runs: Sequence[Run], entries: Sequence[Entry], store: Store,
    costs: Mapping[Run, float], jobs: int,
) -> Iterator[Progress]:  # fmt: skip
    """A `Progress` that is on the screen, and that writes the tables anew whenever a run has ended."""
    bars = Bars(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[told]}"), TimeElapsedColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    screen = _Screen(console, bars, bars.add_task(plan.name, total=None, told=""), plan, entries, store, costs, jobs)
    with bars:
        yield Progress(runs, screen.show)


class _Screen:
    def __init__(
        self, console: Console, bars: Bars, task: TaskID, plan: Plan, entries: Sequence[Entry], store: Store,
        costs: Mapping[Run, float], jobs: int,
    ) -> None:  # fmt: skip
        self._console, self._bars, self._task = console, bars, task
        self._plan, self._entries, self._store = plan, entries, store
        self._costs, self._jobs = costs, jobs
        self._ended = -1
        self._noted = time.monotonic()

    def show(self, progress: Progress) -> None:
        left = self._left(progress)
        told = self._told(progress, left)
        work = sum(self._costs.values())
        self._bars.update(self._task, total=work, completed=work - sum(left), told=told)
        now = time.monotonic()
        if len(progress.ended) != self._ended:
            self._store.write_tables(self._plan, self._entries)
        has_news = len(progress.ended) != self._ended or now - self._noted > _SECONDS_BETWEEN_NOTES
        if has_news and not self._console.is_terminal:
            self._noted = now
            self._console.print(time.strftime("%H:%M  ") + told, markup=False)
        self._ended = len(progress.ended)

    def _told(self, progress: Progress, left: Sequence[float]) -> str:
        minutes = until_all_end(left, self._jobs) / 60
        time_left = f"{minutes / 60:.1f} h" if minutes > 90 else f"{minutes:.0f} min"
        told = f"{len(progress.ended)} of {len(progress.runs)} runs, about {time_left} left"
        return f"{told}; {progress.orphans} of a killed program at work" if progress.orphans else told

    def _left(self, progress: Progress) -> list[float]:
        """Seconds of each run that has not ended, those at work first."""
        begun = {*progress.ended, *progress.steps}
        at_work = (self._costs[run] * (1 - step / run.steps) for run, step in progress.steps.items())
        return [*at_work, *(cost for run, cost in self._costs.items() if run not in begun)]
