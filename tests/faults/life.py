# SPDX-License-Identifier: Apache-2.0
"""One run from its first start to its end, struck on the way, and started again by its own command each time."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults import disks, judge
from tests.faults import strike as strikes
from tests.faults.faults import HANGS, OF_A_DISK, SAVE, START, Fault
from tests.faults.faults import strikes as drawn_strikes
from tests.faults.judge import StartLog
from tests.faults.layouts import LAYOUTS, TARGETS
from tests.faults.starts import Start
from tests.faults.strike import NONE, SIGNALS, Strike
from tests.helpers import jobs

MOST_STARTS = 6
LIMIT = 900.0
"""Seconds of a start on a machine that does much else: imports, Megatron's minute of patience, torchrun's half."""
_SILENCE = 20.0  # one process alone has no peer to notice: its operator ends it
_LENGTH = {"command": 40.0, "shared": 8.0}  # seconds of an undisturbed start on an idle core, about
_CHECKPOINT = 2 << 20
_TIMED_OUT = 124


@dataclass
class Life:
    output: Path
    starts: list[StartLog] = field(default_factory=list)
    struck: list[str] = field(default_factory=list)  # marks of the strikes that happened
    left: int = 0  # processes that outlived the run
    passes: tuple[str, ...] = ()  # SimReg's values in each micro-batch of a step that was computed twice
    blow: int = 0  # the start that the fault itself struck

    @property
    def has_ended(self) -> bool:
        return bool(self.starts) and self.starts[-1].status == 0 and judge.newest(self.output).is_dir()


class Runner:
    """Starts one run again and again; its output, logs and marks go into `folder`."""

    def __init__(self, fault: Fault, folder: Path, text: Path) -> None:
        self.fault, self.folder, self.text = fault, folder, text
        self.layout, self.notes = LAYOUTS[fault.layout], folder / "notes"
        self.output = folder / "output"
        self.life = Life(self.output)
        self.dice = random.Random(fault.name)
        self._groups: set[int] = set()

    def live(self, attempt: int = 0) -> Life:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.notes.mkdir(parents=True)
        planned = [] if self.fault.kind == NONE else drawn_strikes(self.fault, *self._places(), attempt)
        with self._disk():
            for number, strike in enumerate(planned):
                self._prepare_disk(number)
                self.life.blow = number
                if not self._start(strike):
                    break
            self._after_strikes()
            self._go_on_to_the_end()
            self.life.left = self._sweep()
            if self.fault.kind in OF_A_DISK:  # they go with the disk
                self._keep_checkpoint()
        return self.life

    def _places(self) -> tuple[str, str]:
        return str(self.output), str(self.notes)

    # Starts

    def _start(self, strike: Strike | None) -> bool:
        """One start to its end; whether it was struck, or ended as one that is."""
        fault = self.fault
        then = TARGETS[fault.then] if fault.then and self.life.starts else None
        processes = then.processes if then else self.layout.processes
        log = self.folder / f"log{len(self.life.starts)}"
        harmless = Strike(NONE, "clock", 0, 0.0, 0, *self._places())
        environment = (strike or harmless).in_environment()
        words = self.layout.torchrun_words(self.text, self.output, then)
        start = Start(fault.way, words, processes=processes, log=log, notes=self.notes, environment=environment)
        follow = self._blow(start, strike) if strike else nullcontext
        status = self._follow(start, follow)
        text = log.read_text(errors="replace") if log.exists() else ""
        self.life.starts.append(judge.read_log(text, began=start.began, status=status))
        mark = self.notes / strikes.FIRED
        if mark.exists():
            self.life.struck.append(mark.read_text())
            mark.unlink()
            self.life.passes = _lines(self.notes / strikes.PASSES)
        elif strike and status and fault.kind in OF_A_DISK:
            self.life.struck.append('{"what": "the disk"}')
        return status != 0

    def _follow(self, start: Start, blow: Callable[[], object]) -> int:
        """Until it ends; one that hangs without anybody to notice is killed, as by its operator."""
        end, silent_from = start.began + LIMIT, None
        while (status := start.poll()) is None:
            blow()
            self._groups |= start.groups()
            struck = (self.notes / strikes.FIRED).exists()
            if struck and self.fault.kind in HANGS and self.layout.processes == 1:
                silent_from = silent_from or time.time()
            if time.time() > end or (silent_from and time.time() > silent_from + _SILENCE):
                start.kill()
                return _TIMED_OUT
            time.sleep(0.1)
        return status

    def _blow(self, start: Start, strike: Strike) -> Callable[[], object]:
        """Return the action of a strike from outside: nothing before its time, and nothing twice."""
        if strike.when != "clock" and strike.kind not in ("node", "torchrun"):
            return lambda: None
        at = start.began + strike.delay * _LENGTH[self.fault.way] * (1 if strike.when == "clock" else 0)
        done: list[bool] = []

        def blow() -> None:
            is_time = time.time() >= at if strike.when == "clock" else (self.notes / strikes.FIRED).exists()
            if is_time and not done and self._hit(start, strike):
                done.append(True)
                seconds = time.time() - start.began
                (self.notes / strikes.FIRED).write_text(f'{{"what": "after {seconds:.1f} s"}}')

        return blow

    def _hit(self, start: Start, strike: Strike) -> bool:
        if strike.kind == "node":
            start.kill()
            return True
        number = SIGNALS.get(strike.kind, signal.SIGKILL)
        return jobs.send(start.pid if strike.kind == "torchrun" else start.rank(strike.rank), number)

    def _after_strikes(self) -> None:
        if self.fault.kind in OF_A_DISK and self.life.starts and not self.life.has_ended:
            disks.resize(self._disk_folder())

    def _go_on_to_the_end(self) -> None:
        """By the documented command alone; what still trains without its torchrun is waited for."""
        end = time.time() + 2 * LIMIT
        counted = 0
        while not self.life.has_ended and counted < MOST_STARTS and time.time() < end:
            self._start(None)
            if self.life.starts[-1].refused:
                time.sleep(2)
            else:
                counted += 1

    def _sweep(self) -> int:
        """End what outlived the run; how many processes that were."""
        time.sleep(1)
        mine = {pid for pid in _processes() if _belongs(pid, self._groups, str(self.notes))}
        for pid in mine:
            jobs.send(pid, signal.SIGKILL)
        return len(mine)

    # Disks

    def _disk_folder(self) -> Path:
        return self.output / "checkpoints" if self.fault.kind == "read-only" else self.output

    @contextmanager
    def _disk(self) -> Iterator[None]:
        if self.fault.kind not in OF_A_DISK:
            yield
            return
        with disks.small(self._disk_folder()):
            yield

    def _prepare_disk(self, number: int) -> None:
        folder = self._disk_folder()
        if self.fault.kind == "read-only" and self.fault.moment == START:
            disks.make_read_only(folder)
        if self.fault.kind != "full-disk":
            return
        low, high = {START: (0.01, 0.2), SAVE: (0.2, 3.5)}.get(self.fault.moment, (0.1, 3.5))
        share = self.dice.uniform(low, high) if number == 0 else 0.6
        used = 0 if number == 0 else _used(folder)
        disks.resize(folder, used + (int(share * _CHECKPOINT) // 4096 + 1) * 4096)

    def _keep_checkpoint(self) -> None:
        kept = self.folder / "kept" / "checkpoints"
        if judge.newest(self.output).is_dir():
            shutil.copytree(judge.newest(self.output), kept / judge.newest(self.output).name)
            self.life.output = kept.parent


def _lines(path: Path) -> tuple[str, ...]:
    return tuple(path.read_text().splitlines()) if path.exists() else ()


def _used(folder: Path) -> int:
    found = os.statvfs(folder)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _belongs(pid: int, groups: set[int], notes: str) -> bool:
    """By its process group, or by the marks of its strike in its environment."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            if notes.encode() in file.read():
                return True
        state, _, group = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:3]
        return state != "Z" and int(group) in groups
    except (OSError, ValueError):
        return False
