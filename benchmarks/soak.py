# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.soak [--steps 40000] [--plain]`: does a run grow with time?

A model of one layer trains through launch/pretrain_llama.sh with SimReg, AdaGC and trained exponents; it saves and
evaluates every 250 steps, and every 10,000 steps its process ends and a new one resumes. Every second the memory, open
files and threads of the process are read from the kernel. The slope is that of parallel lines through the samples of
all processes, each without its first 500 steps, with its 95 % interval; a sample hangs on the one before, so the
interval is that of every tenth sample.

OUTPUT has one line for each sample; the table next to it (.md) is made of them. Stopped at any time, it goes on where
the run's last checkpoint is.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from scipy import stats

from benchmarks import records
from benchmarks.records import ROOT

PROCESS_STEPS, SAVED_EVERY, WARM = 10_000, 250, 500
EVERY_SECONDS = 1.0
APART = 10  # samples that are taken as independent of each other
UNITS = {"memory": "MiB", "files": "", "threads": "", "milliseconds": "ms"}
COLUMNS = ("process", "step", *UNITS)
_STEP = re.compile(r"iteration\s+(\d+)/.*?elapsed time per iteration \(ms\): ([\d.]+)")
Sample = dict[str, float]


def words(folder: Path, steps: int, *, plain: bool) -> list[str]:
    """The command: all the states that SimReg and AdaGC have, on the smallest model; or neither."""
    flags = (
        "--model tiny --num-layers 1 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 2 --seq-length 64 "
        "--global-batch-size 2 --log-interval 10 --eval-iters 1"
    )
    ours = "--simreg-lambda 1 --simreg-chunk-size 24 --simreg-similarity learnable --simreg-warmup-iters 100 --adagc"
    numbers = {
        "--train-iters": steps, "--save-interval": SAVED_EVERY, "--eval-interval": SAVED_EVERY,
        "--exit-interval": PROCESS_STEPS, "--output": folder,
    }  # fmt: skip
    pairs = [str(word) for pair in numbers.items() for word in pair]
    asked = (flags if plain else f"{flags} {ours}").split()
    return ["bash", str(ROOT / "launch" / "pretrain_llama.sh"), *asked, *pairs, "--auto-resume"]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40_000)
    parser.add_argument("--plain", action="store_true", help="Megatron alone, into soak-plain.csv")
    parser.add_argument("--folder", type=Path, help="of the run and its checkpoints (default: in runs)")
    parser.add_argument("--output", type=Path, metavar="FILE.csv", help="(default: in benchmarks/results)")
    options = parser.parse_args()
    name = "soak-plain" if options.plain else "soak"
    options.folder = options.folder or ROOT / "runs" / name
    options.output = options.output or records.RESULTS / f"{name}.csv"
    done = read(options.output)
    process = int(max((sample["process"] for sample in done), default=0))
    while last_step(options.folder) < options.steps:
        process += 1
        command = words(options.folder, options.steps, plain=options.plain)
        found = list(watched(command, process, options.folder / f"soak-{process}.txt"))
        done += found
        write(options.output, done)
        if not found or found[-1]["step"] >= options.steps:
            break
    text = table(done)
    options.output.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


def watched(command: list[str], process: int, log: Path) -> Iterable[Sample]:
    """Samples of one process, from its first line of the log to its last step: after it, it takes itself apart."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SIMREG_CPU": "1"}
    with log.open("wb") as said:
        job = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
    try:
        while job.poll() is None:
            time.sleep(EVERY_SECONDS)
            steps = _STEP.findall(log.read_text(encoding="utf-8", errors="replace"))
            rank = trainer(job.pid)
            if steps and rank is not None and (step := int(steps[-1][0])) % PROCESS_STEPS:
                yield {"process": process, "step": step, **looked_at(rank), "milliseconds": float(steps[-1][1])}
        if job.returncode:
            sys.exit(f"process {process} ended with status {job.returncode}: its log is {log}")
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGTERM)


def trainer(launcher: int) -> int | None:
    """The process under the launcher that holds the model: the largest."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
            continue
    below = {launcher}
    while more := {child for child, parent in parents.items() if parent in below} - below:
        below |= more
    return max(below, key=_memory, default=None)


def _memory(process: int) -> float:
    try:
        return looked_at(process)["memory"]
    except OSError:
        return 0.0


def looked_at(process: int) -> Sample:
    place = Path("/proc", str(process))
    status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines() if ":" in line)
    return {
        "memory": int(status.get("VmRSS", "0").split()[0]) / 1024,
        "files": len(list((place / "fd").iterdir())),
        "threads": int(status["Threads"]),
    }


def last_step(folder: Path) -> int:
    tracker = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.is_file() else 0


def read(path: Path) -> list[Sample]:
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [{name: float(value) for name, value in line.items()} for line in csv.DictReader(file)]


def write(path: Path, samples: list[Sample]) -> None:
    records.write(path, ({name: f"{sample[name]:g}" for name in COLUMNS} for sample in samples))


def slope(processes: list[list[Sample]], name: str) -> tuple[float, float]:
    """Per 1,000 steps, of lines that are parallel for all processes, and half its 95 % interval."""
    own = [[(sample["step"], sample[name]) for sample in samples] for samples in processes]
    steps, values = (np.concatenate([_from_mean(samples, place) for samples in own]) for place in (0, 1))
    spread = float(steps @ steps)
    found = float(steps @ values) / spread
    independent = len(steps) / APART - len(processes) - 1
    left = values - found * steps
    half = stats.t.ppf(0.975, independent) * (float(left @ left) / independent / spread) ** 0.5
    return 1000 * found, 1000 * half


def _from_mean(samples: list[tuple[float, float]], place: int) -> np.ndarray:
    column = np.array(samples)[:, place]
    return column - column.mean()


def table(samples: list[Sample]) -> str:
    """A row for each thing that was looked at: where each process began and ended, and the slope of all."""
    processes = []
    for process in sorted({sample["process"] for sample in samples}):
        own = [sample for sample in samples if sample["process"] == process]
        processes.append([sample for sample in own if sample["step"] >= own[0]["step"] + WARM])
    rows = ["| what | at first, in each process | at last | per 1,000 steps |", "| --- | --- | --- | --- |"]
    for name, unit in UNITS.items():
        first, last = (", ".join(f"{own[place][name]:.4g}" for own in processes) for place in (0, -1))
        found, half = slope(processes, name)
        rows.append(f"| {name}{', ' + unit if unit else ''} | {first} | {last} | {found:+.2g} ± {half:.2g} |")
    return "\n".join([*rows, ""])


if __name__ == "__main__":
    main()
