# SPDX-License-Identifier: Apache-2.0
"""Several Megatron runs at once: a log file each, what is worth seeing of them, and all stopped if one fails."""

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

from launch.screen import Screen

ITERATION = re.compile(r"\] iteration +(\d+)/ *(\d+) \|")  # anywhere: other ranks' lines may stand before it
GRACE_SECONDS = 35.0  # torchrun gives its workers 30 before it kills them
TICK_SECONDS = 0.5
TAIL_LINES = 15
_VALUE = r"(?:^|\| ){}: +([-+.\w]+) \|"
_PERCENT = re.compile(r"(\d+) % ")
_VALIDATION = re.compile(r"validation loss at iteration (\d+).*? lm loss value: ([-+.\w]+) ")


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


def read_values(line: str, *names: str) -> list[float | None]:
    """What a line of the training log says of these names; None of those that it does not have."""
    found = [re.search(_VALUE.format(re.escape(name)), line) for name in names]
    return [float(match[1]) if match else None for match in found]


def read_validation(line: str) -> tuple[int, float] | None:
    """(step, loss) of a line that reports an evaluation; None for any other line."""
    match = _VALIDATION.search(line)
    return (int(match[1]), float(match[2])) if match else None


class Watch(Protocol):
    """Who is told what the jobs say."""

    def heard(self, job: Job, line: str) -> None: ...

    def tick(self) -> None:
        """Called after each line, and at least every half second."""


def run_side_by_side(jobs: Sequence[Job], watch: Watch) -> None:
    """Run all jobs at the same time; each one's words go to its log, and line by line to `watch`.

    Raises:
        JobFailed: a job failed; the others have been stopped.
        KeyboardInterrupt: the user stopped the demo; so have all jobs been.
    """
    said: queue.Queue[tuple[_Child, str | None]] = queue.Queue()
    children: list[_Child] = []
    try:
        for job in jobs:
            children.append(_Child(job, said))
        for heard in _until_all_end(said, len(jobs)):
            if heard is not None:
                watch.heard(heard[0].job, heard[1])
            watch.tick()
    finally:
        _stop(children)


def _until_all_end(said: queue.Queue, running: int) -> Iterator[tuple[_Child, str] | None]:
    """What is said, and None where nothing is for a while."""
    while running:
        try:
            child, line = said.get(timeout=TICK_SECONDS)
        except queue.Empty:
            yield None
            continue
        if line is not None:
            yield child, line
            continue
        running -= 1
        if status := child.process.wait():
            raise JobFailed(child.job, status, child.tail)


class _Child:
    """A started job: a thread writes all it says to its log and passes it on."""

    def __init__(self, job: Job, said: queue.Queue) -> None:
        self.job = job
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
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


class Trainings:
    """Watches runs of equally many steps: a line for each that a run logs, and one for each evaluation."""

    def __init__(self, screen: Screen, jobs: Sequence[Job], steps: int) -> None:
        self._screen = screen
        self._width = max(len(job.name) for job in jobs)
        self._total = steps
        self._steps = dict.fromkeys((job.name for job in jobs), 0)

    def heard(self, job: Job, line: str) -> None:
        if found := read_iteration(line):
            self._steps[job.name] = found[0]
            self._screen.done(sum(self._steps.values()) / (self._total * len(self._steps)))
            losses = zip(("lm loss", "simreg loss"), read_values(line, "lm loss", "simreg loss"), strict=True)
            self._say(job, found[0], "  ".join(f"{name} {loss:<7.4g}" for name, loss in losses if loss is not None))
        elif evaluated := read_validation(line):
            self._say(job, evaluated[0], f"validation loss {evaluated[1]:.4f}")

    def tick(self) -> None:
        self._screen.tick()

    def _say(self, job: Job, step: int, told: str) -> None:
        self._screen.line(f"{job.name:<{self._width}}  step {step:>{len(str(self._total))}}  {told}".rstrip())


class Turns:
    """Watches one of several short runs that take turns; nothing of it is shown but how far they are."""

    def __init__(self, screen: Screen, number: int, of: int) -> None:
        self._screen, self._number, self._of = screen, number, of

    def heard(self, job: Job, line: str) -> None:
        if found := read_iteration(line):
            self._screen.done((self._number + found[0] / found[1]) / self._of)

    def tick(self) -> None:
        self._screen.tick()


class Notes:
    """Watches jobs that are no training: lines behind `mark` are shown, and "35 % ..." there moves the bar."""

    def __init__(self, screen: Screen, mark: str | None = None) -> None:
        self._screen, self._mark = screen, mark

    def heard(self, job: Job, line: str) -> None:
        if self._mark is None or not line.startswith(self._mark):
            return
        told = line.removeprefix(self._mark)
        if percent := _PERCENT.match(told):
            self._screen.done(int(percent[1]) / 100)
        else:
            self._screen.line(told)

    def tick(self) -> None:
        self._screen.tick()
