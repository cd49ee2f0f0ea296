# SPDX-License-Identifier: Apache-2.0
"""Run one part under its time limit, and keep how it ended; a part that ran to its end is not run again."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from benchmarks.gpu.parts import Part
from benchmarks.records import ROOT
from tests.helpers import jobs

ENDED, FAILED, TOO_LONG = "ended", "failed", "time limit"
_TO_TIDY_UP = 30  # seconds: pytest writes down what it has
_OUT_OF_MEMORY = ("OutOfMemoryError", "CUDA out of memory", "CUDA error: out of memory")


@dataclass(frozen=True)
class Outcome:
    """How a part ended.

    Attributes:
        state: ENDED, FAILED or TOO_LONG.
        of: what it belongs to: commit, GPUs and commands; another one is another part.
        kept: whether an earlier call made it.
    """

    name: str
    state: str
    status: int
    seconds: float
    of: str
    kept: bool = False


def outcome_file(part: Part, output: Path) -> Path:
    return output / f"{part.name}.outcome.json"


def kept(part: Part, output: Path, of: str) -> Outcome | None:
    """The outcome of an earlier call, if the part ran to its end there and nothing else is asked now."""
    try:
        found = Outcome(**json.loads(outcome_file(part, output).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return Outcome(**{**asdict(found), "kept": True}) if (found.state, found.of) == (ENDED, of) else None


def run(part: Part, output: Path, of: str) -> Outcome:
    """Run the part; it never raises for what the part does.

    Raises:
        KeyboardInterrupt: of the user's; nothing of the part is left running.
    """
    started, log = time.monotonic(), output / f"{part.name}.log"
    for stale in (output / f"{part.name}.xml", output / f"{part.name}.csv"):
        stale.unlink(missing_ok=True)
    status: int | None = 1
    for command in part.command_lines():
        with log.open("w", encoding="utf-8") as file:
            file.write(f"$ {shlex.join(command)}\n")
            file.flush()
            status = _status(command, part, 60 * part.minutes - (time.monotonic() - started), file)
        if status in part.fine or not _is_out_of_memory(log):
            break
    is_whole = status in part.fine and (output / part.leaves).exists()  # python without pytest ends with 1, too
    state = TOO_LONG if status is None else ENDED if is_whole else FAILED
    seconds = round(time.monotonic() - started, 1)
    outcome = Outcome(part.name, state, -1 if status is None else status, seconds, of)
    outcome_file(part, output).write_text(json.dumps(asdict(outcome)), encoding="utf-8")
    return outcome


def _status(command: Sequence[str], part: Part, seconds: float, log: IO[str]) -> int | None:
    """None where it did not end in time."""
    environment = {**os.environ, **part.environment, "PYTHONUNBUFFERED": "1"}
    streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
    try:
        with jobs.started(command, cwd=ROOT, env=environment, **streams) as process:
            try:
                return process.wait(max(1.0, seconds))
            except subprocess.TimeoutExpired:
                return None
            finally:
                _ask_to_end(process)
    except OSError as error:
        log.write(f"{error}\n")
        return 1


def _ask_to_end(process: subprocess.Popen[bytes]) -> None:
    """As by Ctrl-C; whatever is left then is killed, ranks in sessions of their own among it."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_TO_TIDY_UP)


def _is_out_of_memory(log: Path) -> bool:
    text = log.read_text(encoding="utf-8", errors="replace")
    return any(words in text for words in _OUT_OF_MEMORY)
