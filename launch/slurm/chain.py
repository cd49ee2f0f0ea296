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
from contextlib import suppress
from pathlib import Path
from typing import Any

from launch import checkpoints
from launch.flags import LaunchError
from launch.record import ENDED
from launch.signals import SAVE_AND_LEAVE

BOOK = "slices.jsonl"
STOP = "stop"
_WATCH_SECONDS = 15
_TELL_AGAIN_SECONDS = 120
_MOST_STARTS = 3  # from the same checkpoint, as of a run that hangs until its job is killed
# Statuses; a job ends as failed unless its chain ends as it should. The job's script tries again after AWAY.
_GO_ON, _AWAY, _FAILED, _CHAIN_ENDS = 0, 1, 2, 3


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m launch.slurm.chain", description=__doc__)
    parser.add_argument("action", choices=("begin", "watch", "end"))
    for name, kind in (("--output", Path), ("--save", Path), ("--keep", int), ("--job", str), ("--status", int)):
        parser.add_argument(name, type=kind)
    options = parser.parse_args()
    chain = Chain(options.output, options.save)
    try:
        if options.action == "begin":
            return chain.begin()
        if options.action == "watch":
            return chain.watch(options.keep, options.job)
        return chain.end(options.keep, options.status)
    except (LaunchError, OSError) as error:  # a disk that is full, or away for a moment
        chain.say(f"error: {error}")
        return _AWAY


class Chain:
    """The slices of one run; `output` is the run's folder, `save` that of its checkpoints."""

    def __init__(self, output: Path, save: Path) -> None:
        self.output, self.save = output, save
        self.book = output / "slurm" / BOOK
        self.ids = {
            "chain": os.environ.get("SLURM_ARRAY_JOB_ID", ""),
            "slice": int(os.environ.get("SLURM_ARRAY_TASK_ID", "1")),
            "restart": int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        }

    def begin(self) -> int:
        """Note where the slice begins; the run itself repairs the checkpoints, once it holds their folder."""
        if checkpoints.is_there(self.output / STOP):
            return self._end_chain(f"{self.output / STOP} exists, so the chain ends: remove it and submit again")
        if checkpoints.is_there(self.output / ENDED):
            return self._end_chain("the run has reached its end")
        iteration = checkpoints.newest_whole(self.save) or 0
        begins = (event for event in self.events() if event["event"] == "begin")
        starts = [*{event["slice"]: event["iteration"] for event in begins}.values()]  # of a restarted one, the last
        if starts[-_MOST_STARTS:] == [iteration] * _MOST_STARTS:
            self.say(
                f"error: {_MOST_STARTS} slices began at iteration {iteration}, and saved nothing. "
                "Does the run hang, or does SLURM end it before it saves? Fix that, then submit again"
            )
            return _FAILED
        self.say(f"begins at iteration {iteration}" + (", restarted by SLURM" if self.ids["restart"] else ""))
        self._note("begin", iteration)
        return _GO_ON

    def watch(self, keep: int, job: str) -> int:
        """Delete old checkpoints until killed; when the stop file appears, have Megatron save and leave."""
        signalled_at, is_stopping = -math.inf, False
        while True:
            for path in self._prune(keep):
                self.say(f"{path} is older than the newest {keep}: deleted")
            with suppress(LaunchError):  # a disk that is away, which `_prune` reports
                is_stopping = checkpoints.is_there(self.output / STOP)
            if is_stopping and time.monotonic() - signalled_at > _TELL_AGAIN_SECONDS:
                if signalled_at < 0:
                    self.say(f"{self.output / STOP} was created: the run saves and stops")
                # To the step only; again until it is gone: nothing hears it before Megatron listens.
                subprocess.run(["scancel", f"--signal={SAVE_AND_LEAVE}", job], check=False)
                signalled_at = time.monotonic()
            time.sleep(_WATCH_SECONDS)

    def end(self, keep: int, status: int) -> int:
        """Note where the slice ended, and decide."""
        self._prune(keep)
        has_ended, stops = (checkpoints.is_there(self.output / name) for name in (ENDED, STOP))
        iteration = checkpoints.newest_whole(self.save) or 0
        events = self.events()
        began = next((event["iteration"] for event in reversed(events) if event["event"] == "begin"), 0)
        others = (event for event in reversed(events) if event["slice"] != self.ids["slice"])  # not of its restarts
        previous = next((event for event in others if event["event"] == "end"), None)
        self._note("end", iteration, status=status, failed=status != 0 or iteration <= began)
        if has_ended:
            return self._end_chain("the run has reached its end")
        if stops:
            return self._end_chain(f"stopped at iteration {iteration} by {self.output / STOP}")
        if iteration > began:
            self.say(f"ends with status {status} at iteration {iteration}, where the next slice resumes")
        else:
            failure = f"ends with status {status} and nothing saved beyond iteration {iteration}"
            if previous is not None and previous["iteration"] == iteration and previous["failed"]:
                self.say(f"{failure}, where the slice before it failed too: fix the cause, then submit again")
                return _FAILED
            self.say(f"{failure}: one more try")
        last = int(os.environ.get("SLURM_ARRAY_TASK_MAX", "0"))
        if self.ids["slice"] == last:
            self.say(f"it was the last of {last} slices, at iteration {iteration}: submit again to continue")
        return _GO_ON

    def _prune(self, keep: int) -> list[Path]:
        """Delete old checkpoints, unless the disk is away for a moment."""
        try:
            return checkpoints.prune(self.save, keep)
        except (LaunchError, OSError) as error:
            self.say(f"warning: no checkpoint was deleted this time: {error}")
            return []

    def events(self) -> list[dict[str, Any]]:
        """Read the book's entries of this chain, without a line that a kill or a full disk has cut off."""
        entries = []
        for line in self.book.read_text(errors="replace").splitlines() if checkpoints.is_there(self.book) else ():
            with suppress(ValueError):
                entries.append(json.loads(line))
        return [entry for entry in entries if entry["chain"] == self.ids["chain"]]

    def _note(self, event: str, iteration: int, **more: Any) -> None:
        """Add one line to the book, by which a run that fails again and again is seen."""
        line = {**self.ids, "event": event, "iteration": iteration, **more, "time": round(time.time())}
        with self.book.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _end_chain(self, why: str) -> int:
        self.say(why)
        return _CHAIN_ENDS

    def say(self, sentence: str) -> None:
        print(f"> {time.strftime('%Y-%m-%d %H:%M:%S')} slice {self.ids['slice']}: {sentence}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
