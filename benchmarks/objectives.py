# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.objectives [--seeds 3]`: what each objective does to one small model on real text.

Real runs of launch/pretrain_llama.sh on the built-in corpus, the objectives taking turns within each seed. One weight
each, not tuned: the table shows what an objective changes, not which one is best.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from simreg_megatron import report
from simreg_megatron.data import ensure_builtin_corpus

ROOT = Path(__file__).resolve().parent.parent
MODEL = {"--num-layers": 2, "--hidden-size": 128, "--ffn-hidden-size": 344, "--num-attention-heads": 4,
         "--global-batch-size": 4}  # fmt: skip
OBJECTIVES = {
    "cross-entropy alone": ("none", ""),
    "SimReg": ("simreg:1", ""),
    "SIGReg, mean": ("sigreg:1", ""),
    "SIGReg, Epps-Pulley": ("sigreg:0.01", "sigreg.estimator=epps-pulley"),
    "sigmoid, balanced": ("sigmoid:0.1", "sigmoid.pair_reduction=balanced"),
    "MIC": ("mic:0.05", "mic.prefixes=16/32/64"),
    "SimReg and SIGReg": ("simreg:1,sigreg:1", ""),
}
COLUMNS = {
    "lm loss validation": ("validation loss", ".3f"),
    "simreg isotropy": ("isotropy", ".3f"),
    "simreg effective rank": ("effective rank", ".1f"),
    "simreg mean cosine": ("mean cosine", ".3f"),
    "simreg radial gradient": ("radial gradient", ".3f"),
    "simreg norm": ("norm", ".2f"),
}
TIME = "iteration-time"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.objectives", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each objective (default: 3)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the table as Markdown, too")
    options = parser.parse_args()
    corpus = ensure_builtin_corpus(ROOT / "data" / "builtin")
    console = Console(width=max(120, Console().width))
    found: dict[str, list[report.Run]] = {name: [] for name in OBJECTIVES}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1, options.seeds + 1):
            for name, (objective, own) in OBJECTIVES.items():
                with console.status(f"seed {seed} of {options.seeds}: {name}"):
                    words = {
                        **MODEL, "--data": corpus.train_prefix, "--tokenizer": corpus.tokenizer_model, "--seed": seed,
                        "--train-iters": options.steps, "--simreg-objective": objective,
                        **({"--simreg-objective-options": own} if own else {}),
                    }  # fmt: skip
                    found[name].append(train(Path(folder, f"{len(found[name])}-{name}"), words, options.steps))
    text = "\n".join(_table(found, options.seeds, options.steps)) + "\n"
    console.print(Markdown(text))
    if options.output:
        options.output.write_text(text, encoding="utf-8")


def train(folder: Path, words: dict[str, object], steps: int) -> report.Run:
    """One run of the tiny LLaMA, logged and evaluated below `folder`; `words` are further flags and their values."""
    flags = {"--log-interval": 10, "--eval-interval": steps, "--save-interval": 10 * steps, **words}
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1",
        "launch/pretrain_llama.sh", "--model", "tiny", "--output", folder, "--log-timers-to-tensorboard",
        *(word for pair in flags.items() for word in pair),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"a run ended with status {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    run = report.read_run(folder / "tensorboard")
    losses = run.scalars["lm loss"].values
    if not all(map(math.isfinite, losses)):
        raise SystemExit(f"a loss is not finite: {losses}")
    return run


def _table(found: dict[str, list[report.Run]], seeds: int, steps: int) -> Iterator[str]:
    width, layers, batch = MODEL["--hidden-size"], MODEL["--num-layers"], MODEL["--global-batch-size"]
    yield (
        f"{layers} layers of width {width}, {steps} steps of {batch} sequences of 256 tokens, chunks of 64, "
        f"{seeds} seed{'s' if seeds > 1 else ''}; mean (and spread: largest less smallest). `python -m "
        f"benchmarks.objectives --seeds {seeds} --steps {steps}`, one CPU thread beside other work, so that times "
        "are coarse."
    )
    yield ""
    yield f"| objective | weight | {' | '.join(title for title, _ in COLUMNS.values())} | ms per step |"
    yield "| --- " * (len(COLUMNS) + 3) + "|"
    for name, runs in found.items():
        cells = [mean_and_spread([run.last(tag) for run in runs], form) for tag, (_, form) in COLUMNS.items()]
        times = [run.median(TIME) for run in runs]
        spent = statistics.median(1000 * time for time in times if time is not None)
        weight = OBJECTIVES[name][0].replace("none", "0")
        yield f"| {name} | {weight} | {' | '.join(cells)} | {spent:.0f} |"


def mean_and_spread(values: list[float | None], form: str) -> str:
    """ "4.250 (0.500)": the mean, and the largest less the smallest where there are several."""
    there = [value for value in values if value is not None]
    if not there:
        return "not logged"
    spread = f" ({max(there) - min(there):{form}})" if len(there) > 1 else ""
    return f"{statistics.fmean(there):{form}}{spread}"


if __name__ == "__main__":
    main()
