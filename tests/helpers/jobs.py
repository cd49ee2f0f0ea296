# SPDX-License-Identifier: Apache-2.0
"""Processes that cannot outlive their test: what hangs is shown where it stands, and all of a job is ended with it.

Every process of a job inherits a mark in its environment; by it those are found that left its session, as ranks of
torchrun do, or lost their parent. Python with PYTHONFAULTHANDLER prints the stacks of its threads on SIGABRT, from C
and without the interpreter's lock: also where it waits in a collective that never returns.
"""

import contextlib
import os
import resource
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 300.0  # seconds; the slowest job takes about 30
_MARK = "SIMREG_TEST_JOB"
_TO_PRINT = 5.0  # seconds for the stacks of one process
_TO_DIE = 60.0  # after SIGKILL: a driver gives a GPU's memory back


class HungError(AssertionError):
    """A job did not end in time; the message has what it printed, and the stacks of its processes."""


def run(
    command: Sequence[str | Path], *, cwd: str | Path | None = None, env: Mapping[str, str] | None = None,
    input: str = "", timeout: float = TIMEOUT, merged: bool = False, check: bool = False,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """The command's status and what it printed; HungError if it took longer than `timeout` seconds.

    `env` replaces this process's environment, `merged` prints errors where output is, and with `check` a status that is
    not 0 is an AssertionError.
    """
    # Files: an unread pipe blocks the writer, and one that is kept open blocks the reader.
    with contextlib.ExitStack() as files:
        given, output, errors = (
            files.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")) for _ in range(3)
        )
        given.write(input)
        given.seek(0)
        streams = {"stdin": given, "stdout": output, "stderr": output if merged else errors}
        with started(command, cwd=cwd, env=env, **streams) as process:
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                print_stacks(process.left())
                said = f"no end after {timeout:g} s: {command}\n{_text_of(output)}{_text_of(errors)}"
                raise HungError(said) from None
        done = subprocess.CompletedProcess(command, process.returncode, _text_of(output), _text_of(errors))
    assert not (check and done.returncode), f"status {done.returncode}: {command}\n{done.stdout}{done.stderr}"
    return done


class Job(subprocess.Popen):
    """The first process of a job."""

    mark: str

    def left(self) -> list[int]:
        """The processes of the job that are there, the oldest first."""
        return with_environment(f"{_MARK}={self.mark}")


def with_environment(*settings: str) -> list[int]:
    """The processes that have all of these NAME=VALUE, the oldest first."""
    found, sought = [], {setting.encode() for setting in settings}
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # of another user, or gone
            if sought <= set(environment.read_bytes().split(b"\0")):
                found.append(int(environment.parent.name))
    return sorted(found)


@contextlib.contextmanager
def started(command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, **options: Any) -> Iterator[Job]:
    """The running command, with the options of Popen; what is left of its job at the end of the block is killed."""
    mark = uuid.uuid4().hex
    environment = {**(os.environ if env is None else env), _MARK: mark, "PYTHONFAULTHANDLER": "1"}
    process = Job(command, env=environment, start_new_session=True, **options)
    process.mark = mark
    try:
        yield process
    finally:
        for pid in process.left():
            send(pid, signal.SIGKILL)
        process.kill()  # one that replaced its environment
        process.wait()
        deadline = time.monotonic() + _TO_DIE
        while process.left() and time.monotonic() < deadline:
            time.sleep(0.01)


def with_descendants(pids: Iterable[int]) -> set[int]:
    """Those of the processes that are there, and all below them."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found: set[int] = set()
    grown = set(pids) & parents.keys()
    while grown:
        found |= grown
        grown = {pid for pid, parent in parents.items() if parent in grown} - found
    return found


def print_stacks(pids: Iterable[int]) -> None:
    """Each prints the stacks of its threads and dies of it; all stand still before the first one dies."""
    pids = list(pids)
    for pid in pids:
        send(pid, signal.SIGSTOP)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
        send(pid, signal.SIGABRT)
        send(pid, signal.SIGCONT)
        deadline = time.monotonic() + _TO_PRINT
        while _state(pid) not in ("Z", "") and time.monotonic() < deadline:
            time.sleep(0.01)


def send(pid: int | None, number: signal.Signals) -> bool:
    """Send a signal, and return whether there was such a process."""
    with contextlib.suppress(ProcessLookupError):
        if pid:
            os.kill(pid, number)
            return True
    return False


def _state(pid: int) -> str:
    """A letter as of ps; empty where there is no such process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    return ""


def _text_of(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
