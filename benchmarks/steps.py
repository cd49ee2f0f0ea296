# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.steps [--model 350m]`: seconds of a whole Megatron step with SimReg off, in chunks and whole.

Real runs of launch/pretrain_llama.sh on the built-in corpus, the kinds taking turns, so that a machine that slows down
slows all of them. Without a GPU only --model tiny runs.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from simreg_megatron.data import ensure_builtin_corpus

ROOT = Path(__file__).resolve().parent.parent
KINDS = {
    "plain Megatron": (),
    "SimReg, chunks": ("--simreg-lambda", "1"),
    "SimReg, whole sequences": ("--simreg-lambda", "1", "--simreg-chunk-size", "0"),
    "SimReg, impl reference": ("--simreg-lambda", "1", "--simreg-impl", "reference"),
    "SimReg, impl triton": ("--simreg-lambda", "1", "--simreg-impl", "triton"),
    "AdaGC alone": ("--adagc",),
}
PAPER = (
    "The paper, 350M on its cluster: 2.295 s and 373.45 GB off, 2.296 s and 375.28 GB whole, "
    "2.295 s and 373.84 GB in chunks."
)
_SECONDS = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)")
_MEMORY = re.compile(r"max allocated: ([\d.]+)")


@dataclass
class Kind:
    """What the runs of one kind said."""

    flags: tuple[str, ...]
    milliseconds: list[float] = field(default_factory=list)
    megabytes: float | None = None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steps", description=__doc__)
    parser.add_argument("--model", default="tiny", help="a preset of launch/models (default: tiny)")
    parser.add_argument("--rounds", type=int, default=4, help="runs of each kind (default: 4)")
    parser.add_argument("--steps", type=int, default=60, help="steps of a run; the first ten do not count")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the table as Markdown, too")
    options = parser.parse_args()
    is_tiny = options.model == "tiny"
    kinds = {name: Kind(flags) for name, flags in KINDS.items() if not (is_tiny and "triton" in flags)}
    corpus = ensure_builtin_corpus(ROOT / "data" / "builtin")
    console = Console(width=max(120, Console().width))
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.rounds):
            for name, kind in kinds.items():
                with console.status(f"round {turn + 1} of {options.rounds}: {name}"):
                    own = ("--data", corpus.train_prefix, "--tokenizer", corpus.tokenizer_model)
                    _train(kind, Path(folder, name.replace(" ", "-")), options.model, options.steps, own)
    text = _table(options.model, kinds)
    console.print(Markdown(text))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text, encoding="utf-8")


def _train(kind: Kind, folder: Path, model: str, steps: int, data: tuple[object, ...]) -> None:
    # One micro-batch a step: what a step costs beside it (the optimizer) is the same in all kinds.
    large = ("--make-vocab-size-divisible-by", "32000", "--micro-batch-size", "8", "--global-batch-size", "8")
    words = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1",
        "launch/pretrain_llama.sh", "--model", model, *data, "--output", folder, "--train-iters", steps,
        "--log-interval", 10, "--eval-iters", 1, "--save-interval", 10 * steps, *(large if model != "tiny" else ()),
        *kind.flags,
    ]  # fmt: skip
    done = subprocess.run([str(word) for word in words], cwd=ROOT, capture_output=True, text=True, env=os.environ)
    if done.returncode:
        raise SystemExit(f"a run ended with status {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    kind.milliseconds += [float(found) for found in _SECONDS.findall(done.stdout)][1:]
    if memory := _MEMORY.findall(done.stdout):
        kind.megabytes = max(map(float, memory))


def _table(model: str, kinds: dict[str, Kind]) -> str:
    medians = {name: statistics.median(kind.milliseconds) for name, kind in kinds.items()}
    base = medians["plain Megatron"]
    lines = [f"# A step of --model {model}", "", "| run | ms | over plain | intervals | peak MB |", "| --- " * 5 + "|"]
    for name, kind in kinds.items():
        memory = "not measured" if kind.megabytes is None else f"{kind.megabytes:.0f}"
        over = f"{100 * (medians[name] / base - 1):+.1f} %"
        lines.append(f"| {name} | {medians[name]:.1f} | {over} | {len(kind.milliseconds)} | {memory} |")
    return "\n".join([*lines, "", PAPER, ""])


if __name__ == "__main__":
    main()
