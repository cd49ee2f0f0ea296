# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.steps [--model 350m]`: time of a whole Megatron step, plain and with SimReg.

Real runs of launch/pretrain_llama.sh. The kinds take turns, so that a machine that slows down slows all of them, and
each ratio is taken within a turn. Every logged interval is a line of the CSV file; its table is made of that
file alone (`--from FILE.csv`). Without a GPU only --model tiny runs.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import launched, records
from benchmarks.alternating_run import LOG_INTERVAL
from benchmarks.records import RESULTS, Record
from benchmarks.timing import overhead

PLAIN = "plain Megatron"
KINDS = {
    PLAIN: (),
    "SimReg measured only": ("--simreg-objective", "none"),
    "SimReg, chunks": ("--simreg-lambda", "1"),
    "SimReg, whole sequences": ("--simreg-lambda", "1", "--simreg-chunk-size", "0"),
    "SimReg, impl reference": ("--simreg-lambda", "1", "--simreg-impl", "reference"),
    "SimReg, impl triton": ("--simreg-lambda", "1", "--simreg-impl", "triton"),
    "AdaGC alone": ("--adagc",),
    "plain Megatron, FFN of the preset": ("--ffn", "literal"),
}
NOT_TINY = ("SimReg, impl triton", "plain Megatron, FFN of the preset")
PAPER = "the paper's Table 3: 7B on H800"
OF_PAPER = {PLAIN: (2295, 373450), "SimReg, chunks of 1024": (2295, 373840), "SimReg, whole sequences": (2296, 375280)}
_MEMORY = re.compile(r"max allocated: ([\d.]+)")
_STEP_TIME = re.compile(r"\] iteration +\d+/.*?elapsed time per iteration \(ms\): ([\d.]+)")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steps", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="turns of all kinds (default: 6)")
    parser.add_argument("--steps", type=int, default=60, help="steps of a run; the first ten do not count")
    launched.add_options(parser)
    records.add_options(parser)
    options = parser.parse_args()
    measured = None if options.source else _measured(options)
    output = options.source or options.output or RESULTS / f"steps-{options.model}.csv"
    records.finish(output, measured, table)


def _measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    kinds = _chosen(options.model, options.kinds)
    own = (*launched.text(options), *options.flags)
    where = launched.surroundings(options, steps=options.steps)
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.rounds):
            names = list(kinds) if turn % 2 == 0 else list(kinds)[::-1]  # none always follows the same one
            for name in names:
                console.print(f"round {turn + 1} of {options.rounds}: {name}")
                said = _train(Path(folder, name.replace(" ", "-")), options.model, options.steps, (*own, *kinds[name]))
                memory = max(map(float, _MEMORY.findall(said)), default=0.0)
                for number, time in enumerate(map(float, _STEP_TIME.findall(said)[1:])):  # the first sets things up
                    yield {"kind": name, "turn": turn, "interval": number, "ms": time, "peak_mb": memory, **where}


def _chosen(model: str, words: str) -> dict[str, tuple[str, ...]]:
    """The kinds whose name holds one of the words, and plain Megatron, that `model` can run."""
    kinds = {PLAIN: KINDS[PLAIN], **launched.chosen(KINDS, words)}
    return {name: flags for name, flags in kinds.items() if model != "tiny" or name not in NOT_TINY}


def _train(folder: Path, model: str, steps: int, own: tuple[str, ...]) -> str:
    words = (
        "--model", model, "--output", folder, "--train-iters", steps, "--log-interval", LOG_INTERVAL, "--eval-iters", 1,
        "--save-interval", 10 * steps, *launched.of_model(model), *own,
    )  # fmt: skip
    return launched.run(launched.TRAIN, words)


def table(lines: list[Record]) -> Iterator[str]:
    model = lines[0]["model"]
    turns = {name: _turns(lines, name) for name in dict.fromkeys(line["kind"] for line in lines)}
    number = len(turns[PLAIN])
    yield f"A step of --model {model}. {records.described(lines)}."
    yield f"Runs of {lines[0]['steps']} steps, {number} turn{'s' if number > 1 else ''}, one run at a time;"
    yield f"ms per step, median of logged intervals of {LOG_INTERVAL} steps."
    yield f"`python -m benchmarks.steps{launched.options_of(lines)}`"
    yield ""
    yield "| run | ms | over plain | 95 % interval | intervals | peak MB |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name, times in turns.items():
        memory = max(float(line["peak_mb"]) for line in lines if line["kind"] == name)
        found = overhead(turns[PLAIN], times)
        over = ("", "") if name == PLAIN else (f"{found.percent:+.1f} %", f"{found.low:+.1f} to {found.high:+.1f} %")
        cells = (name, f"{found.other:.1f}", *over, sum(map(len, times)), f"{memory:.0f}" if memory else "not measured")
        yield f"| {' | '.join(map(str, cells))} |"
    off = OF_PAPER[PLAIN][0]
    for name, (ms, megabytes) in OF_PAPER.items():
        over = "" if name == PLAIN else f"{100 * (ms / off - 1):+.1f} %"
        yield f"| {PAPER}, {name} | {ms} | {over} | not stated | not stated | {megabytes} |"


def _turns(lines: list[Record], kind: str) -> list[list[float]]:
    turns = sorted({int(line["turn"]) for line in lines if line["kind"] == kind})
    its = [(int(line["turn"]), float(line["ms"])) for line in lines if line["kind"] == kind]
    return [[ms for turn, ms in its if turn == number] for number in turns]


if __name__ == "__main__":
    main()
