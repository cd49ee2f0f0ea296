# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.step_pairs [--steps 600]`: a step with SimReg next to its neighbour without, in one run.

Real runs of launch/pretrain_llama.sh in which every other pair of steps is plain Megatron's, function for function:
what else the machine does slows both. Windows of twenty steps hold ten of each kind, a log step among them; the ratio
is that of the window's sums. A line of the CSV file is a step.
"""

from __future__ import annotations

import argparse
import csv
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import launched, records
from benchmarks.alternating_run import LOG_INTERVAL, PROFILED
from benchmarks.records import RESULTS, Record
from benchmarks.timing import overhead
from benchmarks.train import PROFILE, TIMES

KINDS = {
    "SimReg off": ("--simreg-lambda", "0"),  # a control: both kinds of step are plain Megatron's
    "SimReg, chunks": ("--simreg-lambda", "1"),
    "SimReg, a gradient of nearly 0": ("--simreg-lambda", "1e-12"),  # do Megatron's kernels take longer with its own?
    "SimReg, whole sequences": ("--simreg-lambda", "1", "--simreg-chunk-size", "0"),
    "SimReg measured only": ("--simreg-objective", "none"),
    "SimReg, impl reference": ("--simreg-lambda", "1", "--simreg-impl", "reference"),
}
WINDOW = 2 * LOG_INTERVAL
Counts = Callable[[int], Any]  # whether a step counts


def _has_no_log(step: int) -> Any:
    """Log steps measure the geometry, too."""
    return (step + 1) % LOG_INTERVAL


MEASURES: dict[str, tuple[str, Counts]] = {  # column, and the steps of a window that count
    "time on the wall": ("seconds", lambda step: True),
    "time on the wall of steps without a log line": ("seconds", _has_no_log),
    "processor time": ("processor_seconds", lambda step: True),
    "processor time of steps without a log line": ("processor_seconds", _has_no_log),
}
IN_PAIRS: dict[str, tuple[str, Counts]] = {
    "time on the wall of steps without a log line, after one of their kind": (
        "seconds", lambda step: step % 2 and _has_no_log(step)
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_pairs", description=__doc__)
    parser.add_argument("--steps", type=int, default=620, help="of each run; the first twenty do not count")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end each run after this time, keep its steps")
    parser.add_argument("--profile", type=Path, metavar="FILE.json", help="profile some more steps of the last run")
    launched.add_options(parser)
    records.add_options(parser, RESULTS / "step_pairs.csv")
    options = parser.parse_args()
    measured = None if options.source else _measured(options)
    records.finish(options.source or options.output, measured, table)


def _measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    own = (*launched.text(options), *options.flags)
    where = launched.surroundings(options)
    for name, flags in launched.chosen(KINDS, options.kinds).items():
        Console(stderr=True).print(name)
        for step in _train(options, (*own, *flags)):
            yield {"kind": name, **step, **where}


def _train(options: argparse.Namespace, own: tuple[str, ...]) -> list[Record]:
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder, "times.csv")
        words = (
            "--model", options.model, "--output", folder, "--log-interval", LOG_INTERVAL,
            "--train-iters", options.steps + (PROFILED if options.profile else 0),
            "--eval-iters", 1, "--eval-interval", 10 * options.steps, *launched.of_model(options.model), *own,
        )  # fmt: skip
        profile = {PROFILE: str(options.profile.resolve())} if options.profile else {}
        launched.run(words, options.seconds, **{TIMES: str(times)}, **profile)
        with times.open(encoding="utf-8", newline="") as file:
            return [step for step in csv.DictReader(file) if int(step["step"]) >= WINDOW]


def table(lines: list[Record]) -> Iterator[str]:
    yield f"A step of --model {lines[0]['model']}. {records.described(lines)}."
    has_pairs = lines[0]["plain"] == lines[1]["plain"]  # in older rows single steps take turns
    turns = "pair of steps" if has_pairs else "step"
    yield f"In each run every other {turns} is plain Megatron's; windows of {WINDOW} steps."
    yield f"`python -m benchmarks.step_pairs{launched.options_of(lines)}`"
    yield ""
    yield "| run | measure | ms, plain | over plain | 95 % interval | windows |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name in dict.fromkeys(line["kind"] for line in lines):
        for title, (column, counts) in (MEASURES | IN_PAIRS if has_pairs else MEASURES).items():
            plain, other = windows_of([line for line in lines if line["kind"] == name], column, counts)
            found = overhead(plain, other)
            yield (
                f"| {name} | {title} | {found.base:.1f} | {found.percent:+.1f} % | {found.low:+.1f} to "
                f"{found.high:+.1f} % | {len(plain)} |"
            )


def windows_of(lines: list[Record], column: str, counts: Counts) -> tuple[list[list[float]], list[list[float]]]:
    """For each whole window the mean in ms of the steps that count, by kind: of plain Megatron, and with SimReg."""
    found: tuple[list[list[float]], list[list[float]]] = ([], [])
    for first in range(0, len(lines) - WINDOW + 1, WINDOW):
        window = lines[first : first + WINDOW]
        for kind, means in ((1, found[0]), (0, found[1])):
            counted = [line for line in window if int(line["plain"]) == kind and counts(int(line["step"]))]
            means.append([sum(1000 * float(line[column]) for line in counted) / len(counted)])
    return found


if __name__ == "__main__":
    main()
