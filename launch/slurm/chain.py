# SPDX-License-Identifier: Apache-2.0
"""Keep the books of a chain of jobs: where each slice began and ended, and whether another one should follow.

Runs on the first node of a job, on the system's own Python (3.9 or newer, no packages).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from launch import checkpoints, lock
from launch.flags import LaunchError
from launch.record import ENDED
from launch.signals import SAVE_AND_LEAVE

BOOK = "slices.jsonl"
STOP = "stop"
_OPTIONS: tuple[tuple[str, Any, Any], ...] = (  # name, type, default; None: required
    ("--output", Path, None), ("--save", Path, None), ("--keep", int, 1), ("--job", str, ""),
    ("--save-interval", int, 0), ("--status", int, 0),
)  # fmt: skip
_ENTRY = {"chain": str, "slice": int, "restart": int, "event": str, "iteration": int, "status": int, "time": int}
_WATCH_SECONDS = 15
_ATTEMPTS, _ATTEMPT_SECONDS = 3, 10  # a shared file system may be away for a moment
_LOOKS = 12  # two minutes, for what has to be read before anything can be said
_TELL_AGAIN_SECONDS = 120
_UNREPORTED = 3  # slices in a row
_GO_ON, _FAILED, _CHAIN_ENDS = 0, 2, 3  # statuses; a job ends as failed unless its chain ends as it should


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m launch.slurm.chain", description=__doc__)
    parser.add_argument("action", choices=("begin", "watch", "end"))
    for name, kind, default in _OPTIONS:
        parser.add_argument(name, type=kind, default=default, required=default is None)
    options = parser.parse_args()
    chain = Chain(options.output, options.save)
    try:
        if options.action == "begin":
            return chain.begin()
        if options.action == "watch":
            return chain.watch(options.keep, options.job)
        return chain.end(options.keep, options.status, options.save_interval)
    except LaunchError as error:
        chain.say(f"error: {error}")
        return _FAILED


class Chain:
    """The slices of one run; `output` is the run's folder, `save` that of its checkpoints."""

    def __init__(self, output: Path, save: Path) -> None:
        self.output, self.save = output, save
        self.book = output / "slurm" / BOOK
        self.place = {
            "chain": os.environ.get("SLURM_ARRAY_JOB_ID", ""),
            "slice": int(os.environ.get("SLURM_ARRAY_TASK_ID", "1")),
            "restart": int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        }

    def begin(self) -> int:
        """Note where the slice begins; the run itself repairs the checkpoints, once it holds their folder."""
        if self._is_there(STOP):
            return self._end_chain(f"{self.output / STOP} exists, so the chain ends: remove it and submit again")
        if self._is_there(ENDED):
            return self._end_chain("the run has reached its end")
        iteration = self._iteration()
        if self._unreported(iteration) >= _UNREPORTED:
            self.say(
                f"error: {_UNREPORTED} slices began at iteration {iteration}, and none reported its end. "
                "Does the run hang, or does SLURM end it before it saves? Fix that, then submit again"
            )
            return _FAILED
        self.say(f"begins at iteration {iteration}" + (", restarted by SLURM" if self.place["restart"] else ""))
        return _GO_ON if self._note("begin", iteration, 0) else _FAILED

    def watch(self, keep: int, job: str) -> int:
        """Delete old checkpoints until killed; when the stop file appears, have Megatron save and leave."""
        signalled, stops = -math.inf, False
        while True:
            for path in self._prune(keep):
                self.say(f"{path} is older than the newest {keep}: deleted")
            with suppress(LaunchError):  # a disk that is away, which `_prune` reports
                stops = checkpoints.is_there(self.output / STOP)
            if stops and time.monotonic() - signalled > _TELL_AGAIN_SECONDS:
                if signalled < 0:
                    self.say(f"{self.output / STOP} was created: the run saves and stops")
                # To the step only; again until it is gone: nothing hears it before Megatron listens.
                subprocess.run(["scancel", f"--signal={SAVE_AND_LEAVE}", job], check=False)
                signalled = time.monotonic()
            time.sleep(_WATCH_SECONDS)

    def end(self, keep: int, status: int, save_interval: int = 0) -> int:
        """Note where the slice ended, and decide."""
        self._prune(keep)
        began, before = self._history()
        iteration = self._iteration()
        noted = self._note("end", iteration, status)
        if self._is_there(ENDED):
            return self._end_chain("the run has reached its end")
        if self._is_there(STOP):
            return self._end_chain(f"stopped at iteration {iteration} by {self.output / STOP}")
        if not noted:
            return _FAILED
        if iteration > began:
            self.say(f"ends with status {status} at iteration {iteration}, where the next slice resumes")
            if iteration - began < save_interval:
                self.say(
                    f"warning: a slice of {iteration - began} iterations ends before the first --save-interval of "
                    f"{save_interval}, so a crash loses the whole slice: save more often"
                )
        else:
            failure = f"ends with status {status} and nothing saved beyond iteration {iteration}"
            if before is not None and before["iteration"] == iteration and before["failed"]:
                self.say(f"{failure}, where the slice before it failed too: fix the cause, then submit again")
                return _FAILED
            self.say(f"{failure}: one more try")
        last = int(os.environ.get("SLURM_ARRAY_TASK_MAX", "0"))
        if self.place["slice"] == last:
            self.say(f"it was the last of {last} slices, at iteration {iteration}: submit again to continue")
        return _GO_ON

    def _prune(self, keep: int) -> list[Path]:
        """Delete old checkpoints, unless another run holds the folder or the disk is away for a moment."""
        try:
            return checkpoints.prune(self.save, keep) if lock.is_free_for(self.output, self.save) else []
        except (LaunchError, OSError) as error:
            self.say(f"warning: no checkpoint was deleted this time: {error}")
            return []

    def _unreported(self, iteration: int) -> int:
        """Count the slices of this chain that began there in a row without noting their end."""
        count = 0
        for event in reversed(self.events()):
            if (event["chain"], event["event"], event["iteration"]) != (self.place["chain"], "begin", iteration):
                break
            count += 1
        return count

    def _history(self) -> tuple[int, dict[str, Any] | None]:
        """Find where this slice began, and how the one before it in this chain ended."""
        events = [event for event in self.events() if event["chain"] == self.place["chain"]]
        began = [event["iteration"] for event in events if event["event"] == "begin"]
        ends = [event for event in events if event["event"] == "end"]
        before = ends[-1] if ends else None
        if before is not None:
            started = [event for event in events[: events.index(before)] if event["event"] == "begin"]
            stuck = bool(started) and before["iteration"] <= started[-1]["iteration"]
            before = {**before, "failed": stuck or before["status"] != 0}
        return (began[-1] if began else 0), before

    def events(self) -> list[dict[str, Any]]:
        """Read the book's entries, without a last one that was cut off; another damaged one is a LaunchError."""
        entries: list[dict[str, Any] | None] = []
        with suppress(OSError):
            entries = [_entry(line) for line in self.book.read_text(errors="replace").splitlines()]
        if entries and entries[-1] is None:
            del entries[-1]  # the next entry takes its place, and says so
        if None in entries:
            raise LaunchError(
                f"line {entries.index(None) + 1} of {self.book} is damaged: delete that line, then submit again"
            )
        return [entry for entry in entries if entry is not None]

    def _note(self, event: str, iteration: int, status: int) -> bool:
        """Add one line to the book, by which a run that fails again and again is seen."""
        line = {**self.place, "event": event, "iteration": iteration, "status": status, "time": round(time.time())}
        try:
            if _patiently(_append, self.book, json.dumps(line), attempts=_ATTEMPTS, away=OSError):
                self.say(f"the last line of {self.book} was cut off: dropped")
        except OSError as error:
            why = f"{self.book} cannot be written ({error.strerror})"
            self.say(f"error: {why}: the chain ends; free some space, then submit again")
            return False
        return True

    def _iteration(self) -> int:
        """Find the newest complete checkpoint."""
        return _patiently(checkpoints.newest_whole, self.save) or 0

    def _is_there(self, name: str) -> bool:
        return bool(_patiently(checkpoints.is_there, self.output / name))

    def _end_chain(self, why: str) -> int:
        self.say(why)
        return _CHAIN_ENDS

    def say(self, sentence: str) -> None:
        print(f"> {time.strftime('%Y-%m-%d %H:%M:%S')} slice {self.place['slice']}: {sentence}", flush=True)


def _patiently(act: Callable[..., Any], *words: Any, attempts: int = _LOOKS, away: Any = LaunchError) -> Any:
    """Try again after an error: a disk may be away for a moment."""
    for _ in range(attempts - 1):
        with suppress(away):
            return act(*words)
        time.sleep(_ATTEMPT_SECONDS)
    return act(*words)


def _entry(line: str) -> dict[str, Any] | None:
    """Read a line of a book; None if it is damaged."""
    with suppress(ValueError):
        entry = json.loads(line)
        if isinstance(entry, dict) and all(type(entry.get(name)) is kind for name, kind in _ENTRY.items()):
            return entry
    return None


def _append(book: Path, line: str) -> bool:
    """Add a line, and return whether it replaces a last one that a kill or a full disk cut off."""
    with book.open("ab+") as file:
        file.seek(0)
        *whole, last = file.read().splitlines(keepends=True) or [b""]
        is_cut = bool(last) and _entry(last.decode(errors="replace")) is None
        if is_cut:
            file.truncate(sum(map(len, whole)))
        missing = "" if is_cut or not last or last.endswith(b"\n") else "\n"
        file.write(f"{missing}{line}\n".encode())
    return is_cut


if __name__ == "__main__":
    sys.exit(main())
