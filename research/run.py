# SPDX-License-Identifier: Apache-2.0
"""Train the runs of a plan on this machine: some at a time, none twice, resumed where an earlier start was killed.

FOLDER/runs/NAME/     log.txt, TensorBoard and checkpoints of a run; result.json when it has ended
FOLDER/PLAN.csv, ...  the tables of research.tables, written again whenever a run has ended
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.jobs import KEEP_HEAP
from research.plan import ROOT, Entry, Plan, ResearchError, Run
from research.tables import METRICS, Curves, Row, Table, write_table, write_whole
from simreg_megatron import __version__

DONE, DIVERGED, FAILED = "done", "diverged", "failed"
_TAGS = {
    "lm loss": "train_loss",
    "simreg loss": "simreg_loss",
    "simreg positive cosine": "positive_cosine",
    "simreg negative cosine": "negative_cosine",
    "simreg isotropy": "isotropy",
    "simreg margin": "margin",
    **{f"simreg margin {share}%": f"margin_{share}" for share in (10, 50, 90)},
    "simreg margin of right predictions": "margin_right",
    **{f"simreg margin of right predictions {share}%": f"margin_right_{share}" for share in (10, 50, 90)},
    "simreg share of right predictions": "right_share",
    "simreg norm difference of rare labels": "rare_norm_difference",
}
_VALIDATED = re.compile(r"^ validation loss at iteration (\d+) on validation set \|.*? lm loss value: (\S+)", re.M)
_TRAINS = re.compile(r"^> Trains on (.+) in (\w+)$", re.M)  # a line of launch/launcher.py
_COMMIT = re.compile(r"^> Commit (\S+)$", re.M)  # a line of `Runner`
_NOT_FINITE = re.compile(r"\b(found (NaN|Inf)|not finite)\b", re.IGNORECASE)
_FEWEST_STEPS_TO_SAVE, _SAVES = 400, 4


@dataclass(frozen=True)
class Dataset:
    """The text of a plan: its folder, the digest of its files, and what is known of its validation text."""

    folder: Path
    digest: str
    bytes_per_token: float
    validation_tokens: int


def open_dataset(name: str) -> Dataset:
    """Open "builtin", "large" or a folder with train, valid and tokenizer.model.

    Raises:
        ResearchError: a file is missing.
    """
    from sentencepiece import SentencePieceProcessor

    from simreg_megatron.tools.builtin_corpus import ensure_builtin_corpus
    from simreg_megatron.tools.tokens import read_tokens, sha256

    if name == "builtin":
        ensure_builtin_corpus(ROOT / "data" / "builtin")
    folder = (ROOT / "data" / name if name in ("builtin", "large") else Path(name)).resolve()
    files = [folder / file for file in ("train.bin", "train.idx", "valid.bin", "valid.idx", "tokenizer.model")]
    if missing := [file for file in files if not file.is_file()]:
        hint = "`python -m research.corpus --out data/large` makes it" if name == "large" else "see docs/evidence.md"
        raise ResearchError(f"{missing[0]} is missing: {hint}")
    hashes = {file.name: sha256(file) for file in files}
    tokens = read_tokens(folder / "valid")
    pieces = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    parts = (tokens[start : start + 65536].tolist() for start in range(0, len(tokens), 65536))
    size = sum(len(pieces.decode(part).encode()) for part in parts)
    digest = hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()
    return Dataset(folder, digest, size / len(tokens), len(tokens))


def command_of(run: Run, folder: Path, dataset: Dataset) -> list[str]:
    """Make the launcher's command that trains `run` into `folder`."""
    batches = (dataset.validation_tokens - 1) // run.step_tokens  # all of the validation text
    flags = {"eval-iters": str(max(1, batches)), **dict(run.flags)}
    flags |= {
        "data": str(dataset.folder / "train"),
        "valid-data": str(dataset.folder / "valid"),
        "tokenizer": str(dataset.folder / "tokenizer.model"),
        "output": str(folder),
        "data-cache-path": str(folder / "cache"),
    }
    if run.steps >= _FEWEST_STEPS_TO_SAVE:
        flags |= {"auto-resume": "", "save-interval": str(run.steps // _SAVES)}
    words = [word for name, value in flags.items() for word in (f"--{name}", value) if word]
    return [sys.executable, str(ROOT / "launch" / f"pretrain_{run.family}.sh"), *words]


class Store:
    """The results below one folder, from its runs and from tables that were copied there."""

    def __init__(self, folder: Path, tables: dict[str, Table]) -> None:
        self.folder = folder
        self._of_tables: dict[str, tuple[Row, Curves]] = {}
        for table in tables.values():
            for row in table.rows:
                self._of_tables.setdefault(row["run"], (row, table.curves.get(row["run"], {})))

    def folder_of(self, run: Run) -> Path:
        return self.folder / "runs" / run.name

    def result(self, run: Run) -> tuple[Row, Curves] | None:
        """Return a run's row and curves; None while it has not ended, or if it failed."""
        path = self.folder_of(run) / "result.json"
        if not path.is_file():
            return self._of_tables.get(run.digest[:16])
        result = json.loads(path.read_text(encoding="utf-8"))
        return None if result["row"]["status"] == FAILED else (result["row"], result["curves"])

    def write(self, plan: Plan, entries: Sequence[Entry]) -> None:
        write_table(self.folder, plan, [(entry, *result) for entry in entries if (result := self.result(entry.run))])


@dataclass
class Runner:
    """Trains runs side by side; the lock of a run is held by its process, also where this program is killed."""

    store: Store
    dataset: Dataset
    jobs: int
    threads: int

    def train(self, runs: Sequence[Run], changed: Callable[[], None]) -> list[Run]:
        """Train the runs; call `changed` after the end of each; return those that failed.

        Raises:
            KeyboardInterrupt: all that was running is stopped; the same call resumes.
        """
        waiting, failed = list(runs), []
        running: list[tuple[Run, subprocess.Popen, int]] = []
        try:
            while waiting or running:
                for run in list(waiting):
                    if self.store.result(run) is not None:  # another program on this folder trained it
                        waiting.remove(run)
                    elif len(running) < self.jobs and (started := self._start(run)):
                        running.append((run, *started))
                        waiting.remove(run)
                time.sleep(1)
                for run, process, lock in [each for each in running if each[1].poll() is not None]:
                    running.remove((run, process, lock))
                    if not self._conclude(run, process.returncode):
                        failed.append(run)
                    os.close(lock)
                    changed()
        finally:
            for _, process, _ in running:
                os.killpg(process.pid, signal.SIGTERM)
            for _, process, _ in running:
                process.wait()
        return failed

    def _start(self, run: Run) -> tuple[subprocess.Popen, int] | None:
        """Start a run and return its process and lock; return None if another process is training it."""
        folder = self.store.folder_of(run)
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        killed = (folder / "tensorboard").is_dir() and not (folder / "result.json").is_file()
        if killed and self._conclude(run, 0):  # its process went on when the program that started it was killed
            os.close(lock)
            return None
        for name in ("result.json", "ended.json"):  # of a failure
            (folder / name).unlink(missing_ok=True)
        if not (folder / "checkpoints" / "latest_checkpointed_iteration.txt").is_file():
            for part in ("tensorboard", "checkpoints"):
                shutil.rmtree(folder / part, ignore_errors=True)
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(self.threads))
        with (folder / "log.txt").open("ab", buffering=0) as log:
            log.write(f"\n> Commit {commit()}\n".encode())  # the checkout may be another one when the run ends
            process = subprocess.Popen(
                command_of(run, folder, self.dataset), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, env={**KEEP_HEAP, **os.environ, **threads, "PYTHONUNBUFFERED": "1"},
                start_new_session=True, pass_fds=(lock,),
            )  # fmt: skip
        return process, lock

    def _conclude(self, run: Run, status: int) -> bool:
        """Keep what a run came to; return whether it has a result."""
        folder = self.store.folder_of(run)
        row, curves = outcome(folder, status, run.steps, self.dataset)
        write_whole(folder / "result.json", json.dumps({"row": row, "curves": curves}) + "\n")
        if row["status"] == FAILED:
            return False
        for part in ("checkpoints", "cache"):
            shutil.rmtree(folder / part, ignore_errors=True)
        return True


def outcome(folder: Path, status: int, steps: int, dataset: Dataset) -> tuple[dict[str, Any], Curves]:
    """Read a run that ended with exit status `status`: its row of the table, and its curves."""
    from simreg_megatron.tools.curves import ReportError, read_run

    log = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
    source = (_COMMIT.findall(log) or ["unknown"])[-1]
    device, number_type = (_TRAINS.findall(log) or [("unknown", "unknown")])[-1]
    row = {"version": __version__, "commit": source, "device": device, "number_type": number_type, "status": FAILED}
    try:
        scalars = read_run(folder / "tensorboard").scalars
    except ReportError:
        scalars = {}
    # Of the log, since the process may end before TensorBoard's thread has written it:
    losses = {int(step): float(loss) for step, loss in _VALIDATED.findall(log)}
    loss = losses.get(steps, math.nan)
    reached = "lm loss" in scalars and scalars["lm loss"].steps[-1] == steps
    if status or not (reached and math.isfinite(loss)):
        diverged = _NOT_FINITE.search(log[-4000:]) or (reached and steps in losses)
        return row | {"status": DIVERGED if diverged else FAILED}, {}
    curves = {name: scalars[tag] for tag, name in _TAGS.items() if tag in scalars}
    row |= {"status": DONE, "validation_loss": loss, "bits_per_byte": loss / math.log(2) / dataset.bytes_per_token}
    row |= {name: float(curve.values[curve.steps > 0.9 * curve.steps[-1]].mean()) for name, curve in curves.items()}
    if "iteration-time" in scalars:
        row["seconds_per_step"] = statistics.median_high(scalars["iteration-time"].values.tolist())
    row |= {name: f"{row[name]:.6g}" for name in METRICS if name in row}
    points = {name: [*zip(curve.steps.tolist(), curve.values.tolist(), strict=True)] for name, curve in curves.items()}
    return row, {"validation_loss": sorted(losses.items()), **points}


def commit() -> str:
    """Return the commit of the source that runs, with a plus sign if files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
