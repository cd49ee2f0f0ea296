# SPDX-License-Identifier: Apache-2.0
"""Runs as processes of this machine: N at a time, resumed where an earlier start was killed, none of them twice."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from simreg_megatron.cpu.backend import requested
from simreg_megatron.reproduce.dataset import ROOT, Dataset
from simreg_megatron.reproduce.errors import ReproduceError
from simreg_megatron.reproduce.heap import KEPT
from simreg_megatron.reproduce.outcome import log_tail, outcome
from simreg_megatron.reproduce.runs import Run, validation_batches
from simreg_megatron.reproduce.store import FAILED, Claim, Store

_ITERATION = re.compile(r"\] iteration +(\d+)/ *\d+ \|")
_POLL_SECONDS = 1.0
_GRACE_SECONDS = 30.0
_SAVES = 4  # on the way, so that a killed run loses a fifth at most
_FEWEST_STEPS_TO_SAVE = 400  # a shorter run begins anew
_LOWEST = 19  # of the priorities that `nice` gives


@dataclass
class Progress:
    """How far a sequence of runs is; `seen` is told after every change.

    steps: of each run that is at work.
    orphans: runs at work that a program had started which was killed.
    """

    runs: Sequence[Run]
    seen: Callable[[Progress], None]
    ended: list[Run] = field(default_factory=list)
    steps: dict[Run, int] = field(default_factory=dict)
    orphans: int = 0


@dataclass
class _Worker:
    run: Run
    process: subprocess.Popen
    claim: Claim


def command_of(run: Run, folder: Path, dataset: Dataset) -> list[str]:
    """The words that train `run` into `folder`: the launcher's own, ready to be pasted into a shell."""
    flags = dict(run.flags) | dataset.flags | {"output": str(folder), "data-cache-path": str(folder / "cache")}
    flags["eval-iters"] = str(validation_batches(run, dataset))
    if run.steps >= _FEWEST_STEPS_TO_SAVE:
        flags |= {"auto-resume": "", "save-interval": str(run.steps // _SAVES)}
    words = [word for name, value in flags.items() for word in (f"--{name}", value) if word]
    return [sys.executable, str(launcher_of(run.family)), *words]


def launcher_of(family: str) -> Path:
    """The launch script of a family of models.

    Raises:
        ReproduceError: there is none here.
    """
    script = ROOT / "launch" / f"pretrain_{family}.sh"
    if not script.is_file():
        raise ReproduceError(
            f"{script} is missing: experiments run the launch scripts, which are in the repository and not in the "
            "installed package, so run this from a clone"
        )
    return script


def run_here(
    runs: Sequence[Run], store: Store, dataset: Dataset, *, jobs: int, threads: int, progress: Progress
) -> None:
    """Train what has not ended yet; failures are kept beside the run and do not stop the others.

    Args:
        jobs: runs at a time, orphans included; those of another living program are its own.

    Raises:
        KeyboardInterrupt: stopped, with all that was running; the same call resumes.
        ReproduceError: some have ended, on another device than this machine's.
    """
    waiting: list[Run] = []
    for run in runs:
        (progress.ended if store.result(run) else waiting).append(run)
    devices = {result["device"] for run in progress.ended if (result := store.result(run))}
    if waiting and devices and devices != {here := _device()}:
        raise ReproduceError(
            f"runs of this experiment were trained on {' and '.join(devices)}, and the rest would be on {here}: they "
            "could not be compared, so continue there, or give another --output"
        )
    workers: list[_Worker] = []
    progress.orphans = store.orphans()
    progress.seen(progress)
    try:
        while waiting or workers:
            for run in list(waiting):
                free = len(workers) + progress.orphans < jobs
                if free and (worker := _start(run, store, dataset, threads)):
                    workers.append(worker)
                    waiting.remove(run)
                elif store.result(run):  # by an orphan, or another program that works on the same folder
                    waiting.remove(run)
                    progress.ended.append(run)
            time.sleep(_POLL_SECONDS)
            for worker in [worker for worker in workers if worker.process.poll() is not None]:
                workers.remove(worker)
                conclude(worker.run, store, dataset, worker.process.returncode)
                worker.claim.give_back()
                progress.ended.append(worker.run)
            progress.steps = {worker.run: _step(store.run_folder(worker.run)) for worker in workers}
            progress.orphans = store.orphans()
            progress.seen(progress)
    finally:
        _stop(workers)


def _device() -> str:
    """Where the launcher would train on this machine."""
    import torch

    return "cpu" if requested([]) or not torch.cuda.is_available() else torch.cuda.get_device_name()


def _start(run: Run, store: Store, dataset: Dataset, threads: int) -> _Worker | None:
    """None where another process trains it, or did."""
    claim = store.claim(run)
    if claim is None:
        return None
    folder = store.run_folder(run)
    if (folder / "tensorboard").is_dir() and not (folder / "result.json").is_file():  # was killed, or is an orphan's
        conclude(run, store, dataset, 0)
    if store.result(run):
        claim.give_back()
        return None
    clear(folder, "ended.json", "result.json")  # of a failure: the launcher would find nothing left to do
    if not (folder / "checkpoints" / "latest_checkpointed_iteration.txt").is_file():
        clear(folder, "tensorboard", "checkpoints")
    number = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    with (folder / "log.txt").open("ab") as log:
        process = subprocess.Popen(
            command_of(run, folder, dataset),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**KEPT, **os.environ, **number, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C reaches this program alone, which stops the runs in order
            pass_fds=(claim.lock,),
        )
    if os.getpriority(os.PRIO_PROCESS, 0) == _LOWEST:
        _lower_session(process.pid)
    return _Worker(run, process, claim)


def clear(folder: Path, *names: str) -> None:
    """Remove these files and folders of a run, as far as they are there."""
    for name in names:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def conclude(run: Run, store: Store, dataset: Dataset, status: int) -> None:
    """Keep what a run came to whose process ended with exit status `status`."""
    folder = store.run_folder(run)
    result = outcome(folder, status, run.steps, dataset)
    store.keep(run, result)
    if result["status"] != FAILED:
        clear(folder, "checkpoints", "cache", "owner")


def _step(folder: Path) -> int:
    found = _ITERATION.findall(log_tail(folder))
    return int(found[-1]) if found else 0


def _stop(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        _signal(worker, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_SECONDS
    for worker in workers:
        try:
            worker.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _signal(worker, signal.SIGKILL)
            worker.process.wait()
        worker.claim.give_back()


def _signal(worker: _Worker, number: int) -> None:
    if worker.process.poll() is None:
        os.killpg(worker.process.pid, number)


def give_way() -> None:
    """Let this program and all it starts run only when nobody else wants the processor."""
    os.nice(_LOWEST)
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    _lower_session("self")


def _lower_session(process: int | str) -> None:
    """Where Linux groups processes by session (autogroup), groups share the processor first, whoever is in them."""
    with suppress(OSError):  # another kernel
        Path("/proc", str(process), "autogroup").write_text(str(_LOWEST))
