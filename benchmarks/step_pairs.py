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
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import records
from benchmarks.records import RESULTS, ROOT, Record
from benchmarks.train import LOG_INTERVAL, PROFILE, PROFILED, TIMES
from simreg_megatron.tools.builtin_corpus import ensure_builtin_corpus
from tests.helpers import jobs

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
    parser.add_argument("--model", default="tiny", help="a preset of launch/models (default: tiny)")
    parser.add_argument("--kinds", default="", metavar="WORDS", help="only those whose name holds one: chunks,whole")
    parser.add_argument(
        "--flags", type=shlex.split, default=[], metavar="WORDS",
        help="more arguments of the launcher for every run, such as '--micro-batch-size 2 --global-batch-size 2'",
    )  # fmt: skip
    add_text(parser)
    records.add_options(parser, RESULTS / "step_pairs.csv")
    options = parser.parse_args()
    measured = None if options.source else _measured(options)
    records.finish(options.source or options.output, measured, table)


def add_text(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", metavar="PREFIX", help="tokenized text: PREFIX.bin and .idx (default: the built-in)")
    parser.add_argument("--tokenizer", metavar="FILE", help="what it was tokenized with")


def text(options: argparse.Namespace) -> tuple[str, ...]:
    """The launcher's arguments for the text that is given, or for the built-in one, which is made if needed."""
    if options.data:
        return ("--data", options.data, "--tokenizer", options.tokenizer)
    corpus = ensure_builtin_corpus(ROOT / "data" / "builtin")
    return ("--data", str(corpus.train_prefix), "--tokenizer", str(corpus.tokenizer_model))


def _measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    own = (*text(options), *options.flags)
    threads = os.environ.get("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    where = records.surroundings(threads=threads, model=options.model, flags=shlex.join(options.flags))
    for name, flags in KINDS.items():
        if any(word in name for word in options.kinds.split(",")):
            print(name, file=sys.stderr, flush=True)
            for step in _train(options, (*own, *flags)):
                yield {"kind": name, **step, **where}


def _train(options: argparse.Namespace, own: tuple[str, ...]) -> list[Record]:
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder, "times.csv")
        words = (
            "--model", options.model, "--output", folder, "--log-interval", LOG_INTERVAL,
            "--train-iters", options.steps + (PROFILED if options.profile else 0),
            "--eval-iters", 1, "--eval-interval", 10 * options.steps, *_of_model(options.model), *own,
        )  # fmt: skip
        profile = {PROFILE: str(options.profile.resolve())} if options.profile else {}
        _run(words, options.seconds, {TIMES: str(times), **profile})
        with times.open(encoding="utf-8", newline="") as file:
            return [step for step in csv.DictReader(file) if int(step["step"]) >= WINDOW]


def _of_model(model: str) -> tuple[str, ...]:
    """One micro-batch a step: what else a step costs (the optimizer) is the same in all kinds.

    The FFN is aligned: the presets' widths are odd, and products of odd widths are slow with SimReg and without.
    No checkpoint: that of a real size takes gigabytes, and is saved where temporary files are.
    """
    if model == "tiny":
        return ()
    batch = ("--micro-batch-size", "8", "--global-batch-size", "8")
    sizes = ("--make-vocab-size-divisible-by", "32000", "--ffn", "aligned", *batch)
    return (*sizes, "--save", "", "--no-create-attention-mask-in-dataloader")


def _run(words: Iterable[object], seconds: float, environment: dict[str, str]) -> None:
    """Run benchmarks/train.py; it is killed after `seconds` or by Ctrl-C, which is no error: its steps are kept.

    Raises:
        SystemExit: it ended with another status than 0.
    """
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    command = [str(word) for word in (*torchrun, "-m", "benchmarks.train", *words)]
    try:
        done = jobs.run(command, cwd=ROOT, env={**os.environ, **environment}, merged=True, timeout=seconds)
    except (jobs.HungError, KeyboardInterrupt):  # of the runner in benchmarks/gpu at its deadline
        return
    if done.returncode:
        raise SystemExit(f"a run ended with status {done.returncode}:\n{done.stdout[-8000:]}")


def table(lines: list[Record]) -> Iterator[str]:
    if not lines:
        yield "No step was measured."
        return
    yield f"A step of --model {lines[0]['model']}. {records.described(lines)}."
    has_pairs = lines[0]["plain"] == lines[1]["plain"]  # in older rows single steps take turns
    turns = "pair of steps" if has_pairs else "step"
    yield f"In each run every other {turns} is plain Megatron's; windows of {WINDOW} steps."
    model, flags = lines[0]["model"], lines[0].get("flags")  # the first lines that were kept have no such column
    options = f"{'' if model == 'tiny' else f' --model {model}'}{f' --flags={shlex.quote(flags)}' if flags else ''}"
    yield f"`python -m benchmarks.step_pairs{options}`"
    yield ""
    yield "| run | measure | ms, plain | over plain | 95 % interval | windows |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name in dict.fromkeys(line["kind"] for line in lines):
        of_kind = [line for line in lines if line["kind"] == name]
        if len(of_kind) < WINDOW:
            yield f"| {name} | none, as it was stopped after {len(of_kind)} steps | | | | 0 |"
            continue
        for title, (column, counts) in (MEASURES | IN_PAIRS if has_pairs else MEASURES).items():
            plain, other = windows_of(of_kind, column, counts)
            more = overhead(plain, other)
            yield (
                f"| {name} | {title} | {more.base:.1f} | {more.percent:+.1f} % | {more.low:+.1f} to "
                f"{more.high:+.1f} % | {len(plain)} |"
            )


def windows_of(lines: list[Record], column: str, counts: Counts) -> tuple[list[float], list[float]]:
    """For each whole window the mean in ms of the steps that count, by kind: of plain Megatron, and with SimReg."""
    kinds: tuple[list[float], list[float]] = ([], [])
    for first in range(0, len(lines) - WINDOW + 1, WINDOW):
        window = lines[first : first + WINDOW]
        for kind, means in ((1, kinds[0]), (0, kinds[1])):
            counted = [line for line in window if int(line["plain"]) == kind and counts(int(line["step"]))]
            means.append(sum(1000 * float(line[column]) for line in counted) / len(counted))
    return kinds


class Overhead(NamedTuple):
    """base: time per step in the median window; the rest in percent of it."""

    base: float
    percent: float
    low: float  # 95 % interval of the median by order statistics, which holds for few windows, too
    high: float


def overhead(base: Sequence[float], other: Sequence[float]) -> Overhead:
    """Compare two kinds of step by the median over windows of the ratio of their times.

    A machine that slows down slows both kinds of a window alike.
    """
    ratios = sorted(two / one for one, two in zip(base, other, strict=True))
    count, below = len(ratios), 0  # windows that may lie on the wrong side of the median, at odds of 2.5 % or less
    while sum(math.comb(count, wrong) for wrong in range(below + 1)) <= 0.025 * 2**count:
        below += 1
    low, high = (ratios[below - 1], ratios[-below]) if below else (-math.inf, math.inf)
    return Overhead(median(base), *(100 * (each - 1) for each in (median(ratios), low, high)))


if __name__ == "__main__":
    main()
