# SPDX-License-Identifier: Apache-2.0
"""Let one run at a time use an output folder, by a file that its first rank keeps alive and removes at its end.

A killed process leaves the file behind. On the same machine its process id shows that; from another one, a file that
has not been touched for a minute is stale. So chained, resumed and requeued jobs continue without any action.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from launch.flags import LaunchError

NAME = "running.lock"
BEAT_SECONDS = 10.0
COLLECTIVE_SECONDS = 10 * 60.0  # Megatron's --distributed-timeout-minutes, where the run has no other
_SOONER_SECONDS = 2 * 60.0
_PATIENCE_SECONDS = 60.0  # six beats: a file server may show an old time for some seconds


@dataclass(frozen=True)
class Holder:
    """The process that holds a folder; its id counts on the same `machine`, and `born` shows if it was reused."""

    host: str
    machine: str
    pid: int
    born: str
    since: str

    @classmethod
    def here(cls) -> Holder:
        pid = os.getpid()
        return cls(os.uname().nodename, _machine(), pid, _born(pid), time.strftime("%Y-%m-%d %H:%M:%S"))

    def is_gone(self) -> bool | None:
        """Return whether the process has ended; None if this machine cannot see it."""
        if not self.machine or self.machine != _machine():
            return None
        return _born(self.pid) != self.born

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


def _machine() -> str:
    """Identify this boot of this machine and its process namespace; empty if unknown."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _born(pid: int) -> str:
    """Return when a process began, in ticks since the boot; empty if there is none."""
    with suppress(OSError, IndexError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else fields[18]  # a zombie has ended, and a container may never reap it
    return ""


@contextmanager
def held(
    *folders: Path, wait: Callable[[float], None] = time.sleep, collective: float = COLLECTIVE_SECONDS
) -> Iterator[None]:
    """Make and hold the folders until the block ends; a LaunchError if another run holds one, or none can be written.

    `wait` sleeps; `collective` is the seconds after which a rank of this run, or of an earlier slice, gives up.
    """
    taken: list[Path] = []
    gone: list[Holder] = []  # the file of a holder that has ended is not watched in each folder
    done = threading.Event()
    me = Holder.here()
    try:
        for folder in folders:
            taken.append(_take(folder, me, wait, collective - _SOONER_SECONDS, gone))
        threading.Thread(target=_keep_alive, args=(taken, done), daemon=True).start()
        yield
    finally:
        done.set()
        for path in taken:
            _remove(path, me)


def _take(folder: Path, me: Holder, wait: Callable[[float], None], outlives: float, gone: list[Holder]) -> Path:
    path = folder / NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while not _created(path, me):
            holder = _read(path)
            if holder not in gone and not _is_gone(path, holder, wait, outlives):
                raise LaunchError(
                    f"{folder} is in use by another run ({holder or 'unknown'}): end that one first, or give another "
                    f"--output; {path} is removed when it ends, and is safe to delete if no such process is running"
                )
            gone += [holder] if holder else []  # one file that is cut off says nothing of the next
            _remove_alone(path, holder, wait)
    except OSError as error:
        raise LaunchError(f"{folder}: {error.strerror}, so no run can save there: give another --output") from None
    return path


def _created(path: Path, me: Holder) -> bool:
    """Write the file unless there is one, in one step on shared disks, too; one that is cut off is of no holder."""
    with suppress(FileExistsError), path.open("x") as file:
        file.write(json.dumps(asdict(me)) + "\n")
        return True
    return False


def _is_gone(path: Path, holder: Holder | None, wait: Callable[[float], None], outlives: float) -> bool:
    """Return whether the holder has ended, by its process or by a file that it no longer touches.

    A later slice, or a restart, waits for a process on a node that SLURM gave up: it hangs in a collective until that
    times out. The other ranks of this start wait for the first one only as long, so `outlives` is somewhat less.
    """
    gone = None if holder is None else holder.is_gone()
    if gone is not None:
        return gone
    environ = os.environ
    is_later = environ.get("SLURM_ARRAY_TASK_ID", "1") != "1" or environ.get("SLURM_RESTART_COUNT", "0") != "0"
    waits = is_later and holder is not None and holder.host != os.uname().nodename
    limit = f", for up to {outlives / 60:.0f} minutes" if waits else ""
    print(f"> {path} is of {holder or 'an unknown process'}: checking whether it is still running{limit}", flush=True)
    return _stands_still(path, wait, outlives if waits else 0.0)


def _stands_still(path: Path, wait: Callable[[float], None], longest: float = 0.0) -> bool:
    """Return whether the file is untouched for a minute, or removed; it may be touched for the `longest` seconds."""
    seen, waited, still = _touched(path), 0.0, 0.0
    while seen is not None and still < _PATIENCE_SECONDS:
        wait(BEAT_SECONDS / 2)
        waited, still = waited + BEAT_SECONDS / 2, still + BEAT_SECONDS / 2
        before, seen = seen, _touched(path)
        if before != seen:
            still = 0.0
            if seen is not None and waited > longest:
                return False
    return True


def _remove_alone(path: Path, holder: Holder | None, wait: Callable[[float], None]) -> None:
    """Remove a stale file, one process at a time: the slower of two leaves the file of the faster."""
    guard = path.with_name(f"{NAME}.removing")
    try:
        guard.open("x").close()
    except FileExistsError:  # for milliseconds, unless its process was killed just then
        if _stands_still(guard, wait):
            guard.unlink(missing_ok=True)
        return
    try:
        _remove(path, holder)
    finally:
        guard.unlink(missing_ok=True)


def _remove(path: Path, holder: Holder | None) -> None:
    """Remove the file of this holder, without moving another one's: that would let a third process in."""
    with suppress(OSError):
        if _read(path) == holder:
            path.unlink()


def _read(path: Path) -> Holder | None:
    with suppress(OSError, ValueError, TypeError):  # gone, or cut off by a full disk
        return Holder(**json.loads(path.read_text()))
    return None


def _touched(path: Path) -> int | None:
    """Return its time in nanoseconds; opened first, so that a network file system asks its server."""
    with suppress(FileNotFoundError), path.open() as file:
        return os.fstat(file.fileno()).st_mtime_ns
    return None


def _keep_alive(paths: list[Path], done: threading.Event) -> None:
    while not done.wait(BEAT_SECONDS):
        for path in paths:
            with suppress(OSError):  # removed by hand, or a disk that is away for a moment
                os.utime(path)
