# SPDX-License-Identifier: Apache-2.0
"""How long a plan will take, from steps that were measured on this machine at each of its sizes.

    seconds of a run = start + steps * t + validation batches * t / 3

t is a step's seconds while `jobs` runs are at work; a validation step is a forward pass, a third of a training step.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from simreg_megatron.data.settings import write_json
from simreg_megatron.reproduce.dataset import Dataset
from simreg_megatron.reproduce.errors import ReproduceError
from simreg_megatron.reproduce.local import Progress, run_here
from simreg_megatron.reproduce.outcome import log_tail
from simreg_megatron.reproduce.runs import Run, validation_batches
from simreg_megatron.reproduce.store import Store, read_kept

PROBE_STEPS = 20
START_SECONDS = 25.0  # importing, building the model, reading the data, closing
_FORWARD_SHARE = 1 / 3
_KEPT = "speed.json"


def measure(
    runs: Sequence[Run], store: Store, dataset: Dataset, *, jobs: int, threads: int, say: Callable[[str], None]
) -> None:
    """Time a step at each size, once for each number of jobs and threads."""
    found = known(runs, store, jobs=jobs, threads=threads)
    for run in {run.size: run for run in reversed(runs) if run.size not in found}.values():
        say(f"Measuring {PROBE_STEPS} steps of size {run.size}, {jobs} at a time ...")
        seconds = _measured(run, store, dataset, jobs, threads)
        kept = read_kept(store.folder / _KEPT) or {}
        write_json(store.folder / _KEPT, kept | {_key(run, jobs, threads): seconds})


def known(runs: Sequence[Run], store: Store, *, jobs: int, threads: int) -> dict[str, float]:
    """Seconds of a step at each size that was measured."""
    kept = read_kept(store.folder / _KEPT) or {}
    found = {run.size: kept.get(_key(run, jobs, threads)) for run in runs}
    return {size: time for size, time in found.items() if isinstance(time, int | float) and time > 0}


def _key(run: Run, jobs: int, threads: int) -> str:
    return f"{run.family} {run.size}, {jobs} at a time, {threads} threads"


def _measured(run: Run, store: Store, dataset: Dataset, jobs: int, threads: int) -> float:
    short = {"train-iters": str(PROBE_STEPS), "lr-warmup-iters": "1", "log-interval": "1", "eval-interval": "1000000"}
    flags = dict(run.flags) | short | {"eval-iters": "1"}
    probes = [replace(run, flags=tuple(sorted((flags | {"seed": str(seed)}).items()))) for seed in range(1, jobs + 1)]
    aside = Store(store.folder / "speed" / f"{jobs}-{threads}")  # of other numbers these steps would take other times
    run_here(probes, aside, dataset, jobs=jobs, threads=threads, progress=Progress(probes, lambda _: None))
    return statistics.median(step_seconds(aside, probe) for probe in probes)


def step_seconds(store: Store, run: Run) -> float:
    """Median of the logged steps, the first ones left out."""
    from simreg_megatron.report.runs import ReportError, read_run

    folder = store.run_folder(run)
    try:
        return float(statistics.median(read_run(folder / "tensorboard").scalars["iteration-time"].values[5:]))
    except (ReportError, KeyError, statistics.StatisticsError):
        last = [line for line in log_tail(folder).splitlines() if line.strip()] or ["(nothing)"]
        raise ReproduceError(
            f"no time of a step of size {run.size} was logged: mend what {folder / 'log.txt'} ends with: "
            f"{last[-1].strip()}"
        ) from None


def costs(runs: Iterable[Run], dataset: Dataset, seconds: Mapping[str, float]) -> dict[Run, float]:
    """Seconds of each run whose size was measured."""
    return {
        run: START_SECONDS + seconds[run.size] * (run.steps + _FORWARD_SHARE * validation_batches(run, dataset))
        for run in runs
        if run.size in seconds
    }


def until_all_end(seconds: Iterable[float], jobs: int) -> float:
    """Seconds until the last of these runs ends: each begins, in this order, where another one of `jobs` ends."""
    ends = [0.0] * jobs
    for own in seconds:
        heapq.heapreplace(ends, ends[0] + own)
    return max(ends)
