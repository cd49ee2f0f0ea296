# SPDX-License-Identifier: Apache-2.0
"""The bar for one input: a sentence of the reader's own or none, a second, ten times its size in memory, no deeds.

Time is the processor's, since others may use the machine. Memory is the peak of the whole process above what it had
before (Linux keeps it, and lets it be set back). Deeds are what the interpreter reports to its audit hooks: programs
started, addresses connected to, files written outside of the folder, modules imported from outside of what is
installed here.
"""

from __future__ import annotations

import faulthandler
import functools
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from tests.fuzz.target import Target

SECONDS = 1.0
TIMES_ITS_SIZE = 10
CONSTANT = 64 << 20
_LONGEST_SENTENCE = 1200
_GIVE_UP = 5.0  # seconds of processor after which Python code is interrupted
_DEAD = 60  # and of the clock after which a library that hangs takes the process with it

_DEEDS = (
    "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pty.spawn",
    "socket.connect", "socket.getaddrinfo", "pickle.find_class", "os.remove", "os.rename", "os.chmod", "shutil.rmtree",
)  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Finding(NamedTuple):
    """What the bar forbids. `key` is the same for inputs that break the same place."""

    kind: str  # crash, sentence, slow, memory or deed
    key: str
    says: str


class _Hang(BaseException):
    """Not an Exception, so that no reader takes it for a damaged file."""


_folder: str | None = None  # while a reader runs: the folder that is its own
_deeds: list[str] = []
_armed: float | None = None  # when the clock that ends a hanging library was last wound up; None where none runs


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _folder is None:
        return
    if event in _DEEDS and not _is_inside(arguments):
        _deeds.append(f"{event} {arguments!r:.120}")
    elif event == "open":
        path, _, flags = arguments
        if isinstance(flags, int) and flags & _WRITES and not isinstance(path, int) and not _is_inside(arguments):
            _deeds.append(f"open to write {path!r:.120}")
    elif event == "import" and _is_foreign(arguments[0]):
        _deeds.append(f"import {arguments[0]!r:.120}")


def _is_inside(arguments: tuple[Any, ...]) -> bool:
    path = os.fsdecode(arguments[0]) if arguments and isinstance(arguments[0], str | bytes | os.PathLike) else ""
    if not path.startswith("/") and isinstance(arguments[-1], int) and arguments[-1] >= 0:
        path = f"{os.readlink(f'/proc/self/fd/{arguments[-1]}')}/{path}"  # of a folder that is open, as rmtree's are
    return path.startswith((str(_folder), "/dev/null", "/proc/self/"))


def _is_foreign(name: str) -> bool:
    """Libraries import parts of their own late; a package of which nothing is here yet is the input's idea."""
    top = name.partition(".")[0]
    return top not in sys.modules and top not in sys.stdlib_module_names


@contextmanager
def _watched(folder: Path) -> Iterator[None]:
    global _folder
    _deeds.clear()
    _wind_up()
    signal.setitimer(signal.ITIMER_PROF, _GIVE_UP)
    _folder = str(folder)
    try:
        yield
    finally:
        _folder = None
        signal.setitimer(signal.ITIMER_PROF, 0)


@contextmanager
def ends_hangs() -> Iterator[None]:
    """A library that hangs inside takes this process with it, after a minute."""
    global _armed
    _armed = -math.inf
    try:
        yield
    finally:
        _armed = None
        faulthandler.cancel_dump_traceback_later()


def _wind_up() -> None:
    """Not for each input: it starts a thread, which takes longer than most readers."""
    global _armed
    if _armed is not None and time.monotonic() - _armed > _DEAD / 4:
        _armed = time.monotonic()
        faulthandler.dump_traceback_later(_DEAD, exit=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise _Hang


def install() -> None:
    """Once a process, before the first input; audit hooks cannot be taken away again."""
    signal.signal(signal.SIGPROF, _interrupt)
    if not getattr(sys, "_simreg_fuzz_audit", False):
        sys.addaudithook(_audit)
        sys._simreg_fuzz_audit = True  # type: ignore[attr-defined]


def judge(target: Target, folder: Path, data: bytes) -> Finding | None:
    """Have the reader read `data`.

    Args:
        folder: made by the target's `begin`.

    Returns:
        The worst that the bar forbids; None where the reader meets it.
    """
    finding = None
    before, start = _forget_the_peak(), time.process_time()
    try:
        with _watched(folder):
            target.read(folder, data)
    except target.errors as error:
        finding = _about_sentence(error)
    except _Hang:
        finding = Finding("slow", "slow", f"not done after {_GIVE_UP:g} s of processor time")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        finding = Finding("crash", f"crash {_where(error)}", f"{type(error).__name__}: {error!s:.300}, {_where(error)}")
    seconds, taken = time.process_time() - start, _peak() - before
    if _deeds:
        return Finding("deed", f"deed {_deeds[0].split()[0]}", _deeds[0])
    if finding is None and taken > TIMES_ITS_SIZE * len(data) + CONSTANT:
        finding = Finding("memory", "memory", f"{taken >> 20} MiB for {len(data)} bytes")
    if finding is None and seconds > SECONDS:
        finding = Finding("slow", "slow", f"{seconds:.1f} s for {len(data)} bytes")
    return finding


def _about_sentence(error: Exception) -> Finding | None:
    says = str(error)
    wrong = "empty" if not says.strip() else "several lines" if len(says.splitlines()) > 1 else ""
    wrong = wrong or ("long" if len(says) > _LONGEST_SENTENCE else "")
    return Finding("sentence", f"sentence {wrong} {_where(error)}", f"{wrong}: {says[:300]!r}") if wrong else None


def _where(error: BaseException) -> str:
    """The error's class and the deepest line of ours that it went through."""
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_ours(frame.filename)]
    line = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
    return f"{type(error).__name__} at {line}"


def _is_ours(file: str) -> bool:
    return "/simreg_megatron/" in file or "/launch/" in file


@functools.cache
def _of_process(name: str, process: int) -> int:
    """A file of /proc, open for as long as the process lives: opening takes longer than reading."""
    return os.open(f"/proc/{process}/{name}", os.O_WRONLY if name == "clear_refs" else os.O_RDONLY)


def _forget_the_peak() -> int:
    """Set the peak of memory back to what the process has now, and tell it, in bytes."""
    os.pwrite(_of_process("clear_refs", os.getpid()), b"5", 0)
    return _peak()


def _peak() -> int:
    status = os.pread(_of_process("status", os.getpid()), 4096, 0)
    return int(status.partition(b"VmHWM:")[2].split(maxsplit=1)[0]) << 10
