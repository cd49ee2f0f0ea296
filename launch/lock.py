# SPDX-License-Identifier: Apache-2.0
"""One run at a time in an output folder: a file that its first rank keeps alive, and takes away at its end.

A process that was killed leaves the file behind. On the same machine the process id tells; from another one, with
clocks of its own and a node that may be gone, only what can be seen counts: the holder touches its file every few
seconds, so a file that does not change for a minute belongs to nobody. So chained, resumed and requeued jobs continue
without any action by the user.
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
    """Who holds a folder; a process id means something where `machine` is the same, and `born` tells a new process."""

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
        """Whether the process has ended; None where this machine cannot tell."""
        if not self.machine or self.machine != _machine():
            return None
        return _born(self.pid) != self.born

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


def _machine() -> str:
    """This boot of this machine, and the process ids that are seen from here; empty if the system does not tell."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _born(pid: int) -> str:
    """When a process began, in ticks since the boot; empty if there is none."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


@contextmanager
def held(
    *folders: Path, wait: Callable[[float], None] = time.sleep, collective: float = COLLECTIVE_SECONDS
) -> Iterator[None]:
    """Hold the folders, which are made where they are missing, until the block ends.

    Args:
        wait: sleeps for so many seconds.
        collective: seconds after which a rank gives up a collective of this run, and so one of its earlier slices.

    Raises:
        LaunchError: another run holds one of them, or nothing can be written there.
    """
    taken: list[Path] = []
    done = threading.Event()
    me = Holder.here()
    ended: set[Holder] = set()  # of the same run in every folder: one wait is enough
    try:
        for folder in folders:
            taken.append(_take(folder, me, wait, ended, collective - _SOONER_SECONDS))
        threading.Thread(target=_keep_alive, args=(taken, done), daemon=True).start()
        yield
    finally:
        done.set()
        for path in taken:
            _remove(path, me)


def is_free_for(output: Path, folder: Path) -> bool:
    """Whether nobody holds `folder`, or the run that holds `output` does."""
    holder = _read(folder / NAME)
    return not (folder / NAME).exists() if holder is None else holder == _read(output / NAME)


def _take(folder: Path, me: Holder, wait: Callable[[float], None], ended: set[Holder], outlives: float) -> Path:
    path = folder / NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while not _created(path, me):
            _remove_if_stale(path, wait, ended, outlives)
    except OSError as error:
        raise LaunchError(f"{folder}: {error.strerror}, so no run can save there: give another --output") from None
    return path


def _created(path: Path, me: Holder) -> bool:
    """The whole file at once, under its name only if nobody has that: linking is one step on shared disks, too."""
    new = path.with_name(f"{NAME}.{me.host}.{me.pid}")
    new.write_text(json.dumps(asdict(me)) + "\n")
    try:
        os.link(new, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        return _created_in_place(path, new.read_text())
    finally:
        new.unlink(missing_ok=True)
    return True


def _created_in_place(path: Path, text: str) -> bool:
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        return False
    return True


def _remove_if_stale(path: Path, wait: Callable[[float], None], ended: set[Holder], outlives: float) -> None:
    holder, seen = _read(path), _touched(path)
    gone = None if holder is None else holder in ended or holder.is_gone()
    if gone is None and seen is not None:
        print(f"> {path} is of {holder or 'an unknown process'}: checking whether it is still running", flush=True)
        gone = _stands_still(path, seen, wait) or (_goes_on_another(holder) and _dies_at_last(path, wait, outlives))
    if not gone and _touched(path) is not None:  # it may have been given back meanwhile
        raise LaunchError(
            f"{path.parent} is in use by another run ({holder or 'unknown'}): end that one first, or give another "
            f"--output; {path} is removed when it ends, and is safe to delete if no such process is running"
        )
    ended |= {holder} if gone and holder else set()
    _remove_alone(path, holder, wait)


def _goes_on_another(holder: Holder | None) -> bool:
    """Whether this is a later slice of a chain or a restart: the one before may live on, on a node that SLURM lost."""
    environ = os.environ
    is_later = environ.get("SLURM_ARRAY_TASK_ID", "1") != "1" or environ.get("SLURM_RESTART_COUNT", "0") != "0"
    return is_later and holder is not None and holder.host != os.uname().nodename


def _dies_at_last(path: Path, wait: Callable[[float], None], outlives: float) -> bool:
    """A process whose node SLURM gave up waits in a collective until the run's time for these is over.

    It began to minutes ago, before SLURM noticed; and the other ranks of this start wait for the first one as long as
    for a collective, and no longer. So `outlives` is somewhat less.
    """
    print(f"> {path} is still touched: waiting up to {outlives / 60:.0f} minutes for that process", flush=True)
    for _ in range(round(outlives / (1.5 * BEAT_SECONDS))):  # the look that follows takes half a beat at least
        wait(BEAT_SECONDS)
        seen = _touched(path)
        if seen is None or _stands_still(path, seen, wait):
            return True
    return False


def _remove_alone(path: Path, holder: Holder | None, wait: Callable[[float], None]) -> None:
    """One process at a time: the slower of two that saw the stale file finds that of the faster, and leaves it."""
    guard = path.with_name(f"{NAME}.removing")
    try:
        guard.open("x").close()
    except FileExistsError:  # for milliseconds, unless its process was killed just then
        seen = _touched(guard)
        if seen is not None and _stands_still(guard, seen, wait):
            guard.unlink(missing_ok=True)
        return
    try:
        _remove(path, holder)
    finally:
        guard.unlink(missing_ok=True)


def _remove(path: Path, holder: Holder | None) -> None:
    """What another holder put there stays, and is not moved for a moment: that moment would let a third one in."""
    with suppress(OSError):
        if _read(path) == holder:
            path.unlink()


def _stands_still(path: Path, seen: int, wait: Callable[[float], None]) -> bool:
    for _ in range(round(_PATIENCE_SECONDS / BEAT_SECONDS) * 2):
        wait(BEAT_SECONDS / 2)
        if _touched(path) != seen:
            return False
    return True


def _read(path: Path) -> Holder | None:
    with suppress(OSError, ValueError, TypeError):  # gone, or cut off by a full disk
        return Holder(**json.loads(path.read_text()))
    return None


def _touched(path: Path) -> int | None:
    """In nanoseconds; opened first, since a network file system asks its server then."""
    with suppress(FileNotFoundError), path.open() as file:
        return os.fstat(file.fileno()).st_mtime_ns
    return None


def _keep_alive(paths: list[Path], done: threading.Event) -> None:
    while not done.wait(BEAT_SECONDS):
        for path in paths:
            with suppress(OSError):  # removed by hand, or a disk that is away for a moment
                os.utime(path)
