# SPDX-License-Identifier: Apache-2.0
"""Runs as SLURM jobs: each is submitted through launch/slurm as a chain of its own, which resumes and ends by itself.

Nothing waits: a call collects what has ended, submits what is neither ended nor in the queue, and returns. The same
call again, hours later, does the same. FOLDER must be on a disk that all nodes see.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from simreg_megatron.installed import python_path
from simreg_megatron.reproduce.dataset import ROOT, Dataset
from simreg_megatron.reproduce.errors import ReproduceError
from simreg_megatron.reproduce.local import clear, command_of, conclude
from simreg_megatron.reproduce.runs import Run
from simreg_megatron.reproduce.store import Store

_SUBMIT = ("-m", "launch.slurm.submit")
_ENDED, _BOOK = "ended.json", "slurm/slices.jsonl"  # as launch/progress.py and launch/slurm/chain.py write them
_SUBMITTED, _TOLD = "slurm/submitted", "slurm/told"
_SAVES = 4  # on the way of a run


@dataclass
class Standing:
    """Where the runs of a plan are."""

    ended: list[Run] = field(default_factory=list)
    queued: list[Run] = field(default_factory=list)
    submitted: list[Run] = field(default_factory=list)
    failed: list[Run] = field(default_factory=list)

    @property
    def sentence(self) -> str:
        told = f"{len(self.ended)} ended, {len(self.queued)} in the queue, {len(self.submitted)} submitted now"
        if self.failed:
            told += f", {len(self.failed)} failed"
        if self.queued or self.submitted:
            told += "; run the same command again to collect what has ended by then"
        return told


def run_on_cluster(runs: Sequence[Run], store: Store, dataset: Dataset, *, site: Path) -> Standing:
    """Collect and submit.

    Args:
        site: the settings of the cluster, as `launch/slurm/submit.sh --cluster` takes them.

    Raises:
        ReproduceError: this is no machine that submits, or a run cannot be submitted.
    """
    standing, in_queue = Standing(), _names_in_queue()
    for run in runs:
        if store.result(run) is None and run.name not in in_queue:
            _collect(run, store, dataset)
        if store.result(run) is not None:
            standing.ended.append(run)
        elif run.name in in_queue:
            standing.queued.append(run)
        elif store.failure(run) is not None and not _forget_failure(run, store):
            standing.failed.append(run)
        else:
            _submit(run, store, dataset, site)
            standing.submitted.append(run)
    return standing


def _collect(run: Run, store: Store, dataset: Dataset) -> None:
    """Keep what a run that is no longer in the queue came to."""
    folder = store.run_folder(run)
    submitted = any((folder / name).is_file() for name in (_SUBMITTED, _BOOK))
    if not submitted or (folder / "result.json").is_file():  # told before
        return
    logs = sorted((folder / "slurm").glob("*.log"), key=lambda path: path.stat().st_mtime)
    if logs:
        (folder / "log.txt").write_bytes(b"".join(path.read_bytes() for path in logs))
    conclude(run, store, dataset, 0 if (folder / _ENDED).is_file() else 1)


def _forget_failure(run: Run, store: Store) -> bool:
    """A failure is told once; the call after it submits the run anew, which resumes from what it saved."""
    folder = store.run_folder(run)
    if not (folder / _TOLD).exists():
        (folder / _TOLD).touch()
        return False
    clear(folder, _TOLD, "result.json", _SUBMITTED, _BOOK, _ENDED)
    return True


def _submit(run: Run, store: Store, dataset: Dataset, site: Path) -> None:
    folder = store.run_folder(run)
    folder.mkdir(parents=True, exist_ok=True)
    _, script, *words = command_of(run, folder, dataset)
    words = [word for word in words if word != "--auto-resume"]  # the chain's own
    if "--save-interval" not in words:
        words += ["--save-interval", str(max(1, run.steps // _SAVES))]
    _answer([sys.executable, *_SUBMIT, "--cluster", str(site), "--name", run.name, script, *words])
    (folder / _SUBMITTED).touch()


def _names_in_queue() -> set[str]:
    return set(_answer(["squeue", "--noheader", "--me", "--format", "%j"]).split())


def _answer(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": python_path(ROOT)}, capture_output=True, text=True,
            errors="replace", check=True,
        )  # fmt: skip
    except FileNotFoundError:
        raise ReproduceError(f"{command[0]} is not on this machine: submit from a login node of the cluster") from None
    except OSError as error:
        raise ReproduceError(f"{command[0]} cannot be started: {error.strerror}") from None
    except subprocess.CalledProcessError as error:
        told = (error.stderr or error.stdout).strip().splitlines() or ["it said nothing"]
        raise ReproduceError(told[-1].removeprefix("error: ")) from None
    return done.stdout
