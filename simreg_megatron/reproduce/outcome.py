# SPDX-License-Identifier: Apache-2.0
"""What an ended run came to, from its TensorBoard events and its log."""

from __future__ import annotations

import math
import re
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from simreg_megatron import __version__
from simreg_megatron.report.runs import TRAIN_LOSS, ReportError, Run, Series, read_run
from simreg_megatron.reproduce.dataset import ROOT, Dataset
from simreg_megatron.reproduce.store import DIVERGED, DONE, FAILED, MACHINE

VALIDATION = "lm loss validation"
_CURVES = {
    VALIDATION: "validation_loss",
    "lm loss": "train_loss",
    "simreg loss": "simreg_loss",
    "simreg positive cosine": "positive_cosine",
    "simreg negative cosine": "negative_cosine",
    "simreg isotropy": "isotropy",
    "simreg margin": "margin",
    "simreg margin 10%": "margin_10",
    "simreg margin 50%": "margin_50",
    "simreg margin 90%": "margin_90",
    "simreg margin of right predictions": "margin_right",
    "simreg margin of right predictions 10%": "margin_right_10",
    "simreg margin of right predictions 50%": "margin_right_50",
    "simreg margin of right predictions 90%": "margin_right_90",
    "simreg share of right predictions": "right_share",
    "simreg norm difference of rare labels": "rare_norm_difference",
}
_NOT_FINITE = re.compile(r"\b(found (NaN|Inf)|not finite)\b", re.IGNORECASE)
_VALIDATED = re.compile(r"^ validation loss at iteration (\d+) on validation set \|.*? lm loss value: (\S+)", re.M)
_TRAINS = re.compile(r"^> Trains on (.+) in (\w+)$", re.M)  # of launch/launcher.py
_LOG = 1 << 28  # bytes, more than any log has


def outcome(folder: Path, status: int, steps: int, dataset: Dataset) -> dict[str, Any]:
    """The result of the run of `steps` steps in `folder`, which ended with exit status `status`."""
    *_, machine = ("unknown", "unknown"), *_TRAINS.findall(log_tail(folder, _LOG))
    kept = {"version": __version__, "commit": commit(), **dict(zip(MACHINE, machine, strict=True)), "curves": {}}
    tail = log_tail(folder)
    run, lacks = (None, tail) if status else _read(folder, steps)
    if run is None:
        kind = DIVERGED if _NOT_FINITE.search(f"{lacks}\n{tail}") else FAILED
        return {"status": kind, "exit": status, "tail": lacks, **kept}
    loss = float(run.scalars[VALIDATION].values[-1])
    return {
        "status": DONE,
        **{name: run.mean_of_end(tag) for tag, name in _CURVES.items()},
        "validation_loss": loss,
        "bits_per_byte": loss / math.log(2) / dataset.bytes_per_token,
        "seconds_per_step": run.median("iteration-time"),
        **kept,
        "curves": {name: _points(run, tag) for tag, name in _CURVES.items() if tag in run.scalars},
    }


def _read(folder: Path, steps: int) -> tuple[Run | None, str]:
    """A run that was validated after its last step; else None, and what it lacks."""
    try:
        run = _with_loss_of_log(read_run(folder / "tensorboard"), folder, steps)
    except ReportError as error:
        return None, str(error)
    if VALIDATION not in run.scalars:
        return None, "it ended without a validation loss"
    step, loss = (series[-1] for series in run.scalars[VALIDATION])
    if not math.isfinite(loss):
        return None, f"its validation loss is not finite ({loss})"
    return (run, "") if step == steps else (None, f"its last validation loss is of step {step}, and it has {steps}")


def _with_loss_of_log(run: Run, folder: Path, steps: int) -> Run:
    """Take the last validation loss from the log if the process ended before TensorBoard's thread wrote it."""
    losses = {int(step): float(loss) for step, loss in _VALIDATED.findall(log_tail(folder, _LOG))}
    trained = run.scalars.get(TRAIN_LOSS)
    if VALIDATION in run.scalars or steps not in losses or trained is None or trained.steps[-1] != steps:
        return run  # with a curve that ends before, it was resumed, and has yet to repeat what its log says
    return replace(run, scalars={**run.scalars, VALIDATION: Series(np.array([steps]), np.array([losses[steps]]))})


def _points(run: Run, tag: str) -> list[tuple[int, float]]:
    steps, values = run.scalars[tag]
    return [(int(step), float(value)) for step, value in zip(steps, values, strict=True)]


def log_tail(folder: Path, most: int = 4000) -> str:
    """The last bytes of a run's log; "" if there is none."""
    try:
        with (folder / "log.txt").open("rb") as stream:
            stream.seek(max(0, stream.seek(0, 2) - most))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""


@cache
def commit() -> str:
    """Of the source that runs: a hash, with a plus sign where files differ from it; "" where there is no git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""
