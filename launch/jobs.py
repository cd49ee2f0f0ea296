# SPDX-License-Identifier: Apache-2.0
"""Run several commands at once: a log file each, their lines as they come, and all stopped when one fails."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

GRACE_SECONDS = 35.0  # torchrun gives its workers 30 before it kills them
KEEP_HEAP = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(4 << 30))
"""For processes that train on a CPU: glibc keeps large tensors' memory instead of giving it back, which saves about a
tenth of a step of the tiny models. The numbers are the same."""


@dataclass(frozen=True)
class Job:
    """A command, its name on the screen, and the file that keeps its output."""

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)


class JobFailed(RuntimeError):
    """A job ended with another exit status than 0."""


def run_jobs(jobs: Sequence[Job], heard: Callable[[Job, str], None] = lambda job, line: None) -> None:
    """Run all jobs at the same time; call `heard` with each line that one prints. One that fails stops the others."""
    running: dict[str, subprocess.Popen] = {}
    readers = {}
    try:
        for job in jobs:
            job.log.parent.mkdir(parents=True, exist_ok=True)
            with job.log.open("w") as log:
                running[job.name] = subprocess.Popen(
                    list(job.command), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **job.environment},
                    start_new_session=True,  # Ctrl-C reaches this process alone, which then stops the jobs
                )  # fmt: skip
            readers[job.name] = job.log.open(encoding="utf-8", errors="replace")
        left = list(jobs)
        while left:
            time.sleep(0.2)
            for job in list(left):
                status = running[job.name].poll()  # before the last lines are read
                for line in readers[job.name]:
                    heard(job, line.rstrip())
                if status is not None:
                    left.remove(job)
                if status:
                    tail = "".join(job.log.read_text(encoding="utf-8", errors="replace").splitlines(True)[-15:])
                    raise JobFailed(f"{tail}The {job.name} run ended with exit status {status}: its log is {job.log}")
    finally:
        for reader in readers.values():
            reader.close()
        _stop([process for process in running.values() if process.poll() is None])


def _stop(processes: Sequence[subprocess.Popen]) -> None:
    """End processes and what they started by SIGTERM, and those that are left after a while by SIGKILL."""
    for process in processes:
        os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
