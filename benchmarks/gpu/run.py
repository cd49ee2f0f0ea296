# SPDX-License-Identifier: Apache-2.0
"""Run the parts of a stage side by side, each under its own time limit, and all stages under one."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import IO, NamedTuple

from benchmarks.gpu.parts import Part
from benchmarks.records import ROOT
from tests.helpers import jobs

ENDED, FAILED, TOO_LONG, NO_TIME = "ended", "failed", "time limit", "no time left"
CALL = 450.0  # seconds, for which the limits of the parts are made
_TO_TIDY_UP = 10.0  # seconds: pytest writes down what it has
_SHORTEST = 15.0  # seconds: a part is not started if less is left
_OUT_OF_MEMORY = ("OutOfMemoryError", "CUDA out of memory", "CUDA error: out of memory")


class Outcome(NamedTuple):
    """How a part ended: ENDED, FAILED, TOO_LONG, or not started for want of time."""

    name: str
    state: str
    status: int = -1
    seconds: float = 0.0


class Runner(NamedTuple):
    """Runs parts for `seconds` in all, and writes their logs into `output`; `environment` is added to the process's."""

    output: Path
    seconds: float
    environment: Mapping[str, str]

    def run(self, stages: Iterable[Sequence[Part]], keep: Callable[[Outcome], None]) -> None:
        """Run the stages one after another; `keep` gets the outcome of each part when it ends.

        Raises:
            KeyboardInterrupt: by the user; nothing of any part is left running.
        """
        end, stop = time.monotonic() + self.seconds, threading.Event()
        for stage in filter(None, stages):
            with ThreadPoolExecutor(max_workers=len(stage)) as threads:
                try:
                    for ended in as_completed([threads.submit(self._part, part, end, stop) for part in stage]):
                        keep(ended.result())
                except BaseException:
                    stop.set()
                    raise

    def _part(self, part: Part, end: float, stop: threading.Event) -> Outcome:
        began, log = time.monotonic(), self.output / f"{part.name}.log"
        if end - began < _SHORTEST:
            return Outcome(part.name, NO_TIME)
        for stale in self.output.glob(f"{part.name}.*"):
            stale.unlink()
        limit = part.seconds * max(1.0, self.seconds / CALL)
        status: int | None = None
        for command in part.commands:
            with log.open("w", encoding="utf-8") as file:
                status = self._status(command, file, min(began + limit, end - _TO_TIDY_UP), stop)
            text = log.read_text(encoding="utf-8", errors="replace")
            if status in (None, *part.fine) or not any(words in text for words in _OUT_OF_MEMORY):
                break
        is_whole = status in part.fine and (self.output / part.leaves).exists()  # without pytest, python ends with 1
        state = TOO_LONG if status is None else ENDED if is_whole else FAILED
        return Outcome(part.name, state, -1 if status is None else status, time.monotonic() - began)

    def _status(self, command: Sequence[str], log: IO[str], deadline: float, stop: threading.Event) -> int | None:
        """The status of the command; None if it did not end in time."""
        log.write(f"$ {shlex.join(command)}\n")
        log.flush()
        environment = {**os.environ, **self.environment, "PYTHONUNBUFFERED": "1"}
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        try:
            with jobs.started(command, cwd=ROOT, env=environment, **streams) as process:
                while process.poll() is None and time.monotonic() < deadline and not stop.wait(0.1):
                    pass
                status = process.poll()
                if status is None:  # as by Ctrl-C; the end of the block kills what is left, ranks among it
                    process.send_signal(signal.SIGINT)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(_TO_TIDY_UP)
                return status
        except OSError as error:
            log.write(f"{error}\n")
            return 127
