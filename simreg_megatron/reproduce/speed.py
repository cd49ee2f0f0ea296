# SPDX-License-Identifier: Apache-2.0
"""How long a plan will take, from steps that were measured on this machine at each of its sizes.

    hours = sum over runs (start + steps * t + validation batches * t / 3) / (3600 * jobs)

t is a step's seconds while `jobs` runs are at work; a validation step is a forward pass, a third of a training step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from simreg_megatron.data.settings import read_json, write_json
from simreg_megatron.reproduce.dataset import Dataset
from simreg_megatron.reproduce.local import Progress, run_here
from simreg_megatron.reproduce.runs import Run, validation_batches
from simreg_megatron.reproduce.store import Store

PROBE_STEPS = 20
START_SECONDS = 25.0  # importing, building the model, reading the data, closing
_FORWARD_SHARE = 1 / 3
_KEPT = "speed.json"


@dataclass(frozen=True)
class Estimate:
    """What a plan asks for."""

    runs: int
    runs_left: int
    tokens: int
    hours: float


def measure(
    runs: Sequence[Run], store: Store, dataset: Dataset, *, jobs: int, threads: int, say: Callable[[str], None]
) -> dict[str, float]:
    """Seconds of a step at each size, measured once for each number of jobs and threads and then kept."""
    kept = read_json(store.folder / _KEPT) or {}
    found: dict[str, float] = {}
    for run in {run.size: run for run in reversed(runs)}.values():
        key = f"{run.family} {run.size}, {jobs} at a time, {threads} threads"
        if key not in kept:
            say(f"Measuring {PROBE_STEPS} steps of size {run.size}, {jobs} at a time ...")
            kept[key] = _measured(run, store, dataset, jobs, threads)
            write_json(store.folder / _KEPT, kept)
        found[run.size] = kept[key]
    return found


def _measured(run: Run, store: Store, dataset: Dataset, jobs: int, threads: int) -> float:
    short = {"train-iters": str(PROBE_STEPS), "lr-warmup-iters": "1", "log-interval": "1", "eval-interval": "1000000"}
    flags = dict(run.flags) | short | {"eval-iters": "1"}
    probes = [replace(run, flags=tuple(sorted((flags | {"seed": str(seed)}).items()))) for seed in range(1, jobs + 1)]
    aside = Store(store.folder / "speed")
    run_here(probes, aside, dataset, jobs=jobs, threads=threads, progress=Progress(probes, lambda _: None))
    return statistics.median(step_seconds(aside, probe) for probe in probes)


def step_seconds(store: Store, run: Run) -> float:
    """Median of the logged steps, the first ones left out."""
    from simreg_megatron.report.runs import read_run

    return float(
        statistics.median(read_run(store.run_folder(run) / "tensorboard").scalars["iteration-time"].values[5:])
    )


def estimate(
    runs: Sequence[Run], store: Store, dataset: Dataset, seconds: dict[str, float], *, jobs: int, tokens: int
) -> Estimate:
    """Runs, tokens and hours of what has not ended yet."""
    left = [run for run in runs if store.result(run) is None]
    spent = 0.0
    for run in left:
        evaluation = validation_batches(run, dataset) * _FORWARD_SHARE
        spent += START_SECONDS + seconds[run.size] * (run.steps + evaluation)
    return Estimate(len(runs), len(left), tokens, spent / 3600 / max(1, jobs))
