# SPDX-License-Identifier: Apache-2.0
"""Several Megatron runs at once: their logs on one screen, line by line, and all of them stopped if one fails."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

ITERATION = re.compile(r"\] iteration +(\d+)/ *(\d+) \|")  # anywhere: other ranks' lines may stand before it
GRACE_SECONDS = 35.0  # torchrun gives its workers 30 before it kills them
TAIL_LINES = 15
SECONDS_BETWEEN_NOTES = 60.0
STYLES = ("bold blue", "bold yellow", "bold green", "bold magenta")


@dataclass(frozen=True)
class Job:
    """A command to run, its name on the screen and the file that keeps all it says."""

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)


class JobFailed(RuntimeError):
    """A job ended with another status than 0; the message is the one sentence the user reads.

    tail: the last lines it said.
    """

    def __init__(self, job: Job, status: int, tail: Sequence[str]) -> None:
        how = f"was ended by signal {-status}" if status < 0 else f"stopped with exit status {status}"
        super().__init__(f"The {job.name} run {how}: its log is {job.log}.")
        self.tail = list(tail)


def read_iteration(line: str) -> tuple[int, int] | None:
    """(step, steps in all) of a line of Megatron's training log; None for any other line."""
    match = ITERATION.search(line)
    return (int(match[1]), int(match[2])) if match else None


def run_side_by_side(jobs: Sequence[Job], *, console: Console, steps: int) -> None:
    """Run all jobs at the same time and show their logs as they come.

    Args:
        jobs: what to run; the names label the lines.
        console: a terminal gets progress bars, anything else a line of progress each minute.
        steps: training steps of each job.

    Raises:
        JobFailed: a job failed; the others have been stopped.
        KeyboardInterrupt: the user stopped the demo; so have all jobs been.
    """
    screen_type: type[Bars] | type[PlainLines] = Bars if console.is_terminal else PlainLines
    said: queue.Queue[tuple[_Child, str | None]] = queue.Queue()
    children: list[_Child] = []
    try:
        with screen_type(console, jobs, steps) as screen:
            for job in jobs:
                children.append(_Child(job, said))
            for child, line in _until_all_end(said, len(jobs)):
                _show(screen, child, line)
    finally:
        _stop(children)


def _until_all_end(said: queue.Queue, running: int) -> Iterator[tuple[_Child, str]]:
    while running:
        child, line = said.get()
        if line is not None:
            yield child, line
            continue
        running -= 1
        if status := child.process.wait():
            raise JobFailed(child.job, status, child.tail)


def _show(screen: Screen, child: _Child, line: str) -> None:
    for shown in child.fold.pass_on(line):
        screen.line(child.job.name, shown)
    if found := read_iteration(line):
        screen.progress(child.job.name, found[0])


class _Child:
    """A started job: a thread writes all it says to its log and passes it on."""

    def __init__(self, job: Job, said: queue.Queue) -> None:
        self.job = job
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.fold = ArgumentFold()
        job.log.parent.mkdir(parents=True, exist_ok=True)
        self.process = subprocess.Popen(
            list(job.command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **job.environment},
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches this process alone, which then stops the job in order
        )
        threading.Thread(target=self._listen, args=(said,), daemon=True).start()

    def _listen(self, said: queue.Queue) -> None:
        assert self.process.stdout is not None
        with self.job.log.open("w", encoding="utf-8") as log, self.process.stdout as output:
            for line in output:
                log.write(line)
                log.flush()
                self.tail.append(line.rstrip())
                said.put((self, line.rstrip()))
        said.put((self, None))


def _stop(children: Sequence[_Child]) -> None:
    """End what still runs: politely first, so that torchrun ends its workers."""
    running = [child.process for child in children if child.process.poll() is None]
    for process in running:
        os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    for process in running:
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class ArgumentFold:
    """Leaves Megatron's list of all its arguments, over 800 lines, to the log file."""

    def __init__(self) -> None:
        self._folded: int | None = None

    def pass_on(self, line: str) -> list[str]:
        """The lines to show now that `line` has come."""
        if self._folded is None and line.endswith("- arguments ------------------------"):
            self._folded = 0
            return []
        if self._folded is None:
            return [line]
        if line.startswith("-------------------- end of arguments"):
            count, self._folded = self._folded, None
            return [f"(Megatron lists {count} arguments here: see the log file)"]
        self._folded += 1
        return []


class Screen(Protocol):
    """Where lines and progress go."""

    def line(self, name: str, text: str) -> None: ...

    def progress(self, name: str, step: int) -> None: ...


class Bars:
    """A terminal: lines scroll above one progress bar per job."""

    def __init__(self, console: Console, jobs: Sequence[Job], steps: int) -> None:
        self._bars = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps, left"),
            TimeRemainingColumn(), console=console, transient=True,
        )  # fmt: skip
        self._width = max(len(job.name) for job in jobs)
        self._styles = {job.name: STYLES[index % len(STYLES)] for index, job in enumerate(jobs)}
        self._tasks: dict[str, TaskID] = {job.name: self._bars.add_task(job.name, total=steps) for job in jobs}

    def __enter__(self) -> Bars:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def line(self, name: str, text: str) -> None:
        label = Text(f"{name:<{self._width}} | ", style=self._styles[name])
        self._bars.console.print(label.append(text, style="default not bold"), soft_wrap=True, highlight=False)

    def progress(self, name: str, step: int) -> None:
        self._bars.update(self._tasks[name], completed=step)


class PlainLines:
    """A file or a pipe: labelled lines, and each minute one that says how far the jobs are."""

    def __init__(self, console: Console, jobs: Sequence[Job], steps: int) -> None:
        self._console = console
        self._width = max(len(job.name) for job in jobs)
        self._total = steps
        self._steps = dict.fromkeys((job.name for job in jobs), 0)
        self._first: dict[str, tuple[float, int]] = {}
        self._noted = time.monotonic()

    def __enter__(self) -> PlainLines:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def line(self, name: str, text: str) -> None:
        self._console.print(f"{name:<{self._width}} | {text}", markup=False, highlight=False, soft_wrap=True)

    def progress(self, name: str, step: int) -> None:
        now = time.monotonic()
        self._steps[name] = step
        self._first.setdefault(name, (now, step))
        if now - self._noted >= SECONDS_BETWEEN_NOTES:
            self._noted = now
            done = ", ".join(f"{job} {step} of {self._total}" for job, step in self._steps.items())
            self.line("progress", f"{done} steps; about {self._minutes_left(now):.1f} min left")

    def _minutes_left(self, now: float) -> float:
        """The slowest job's remaining steps at its pace since its first logged step."""
        left = 0.0
        for name, (since, first) in self._first.items():
            taken = self._steps[name] - first
            if taken > 0:
                left = max(left, (self._total - self._steps[name]) * (now - since) / taken)
        return left / 60
