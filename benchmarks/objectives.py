# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.objectives [--seeds 3]`: what each objective does to one small model on real text.

Real runs of launch/pretrain_llama.sh on the built-in corpus, one at a time, the objectives taking turns in each seed.
One weight each, not tuned: the table shows what an objective changes, not which one is best. Each run is a line of
benchmarks/results/objectives.csv; the table in docs/objectives.md is made of that file (`--from FILE.csv`).
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import launched, records
from benchmarks.records import RESULTS, ROOT, Record
from simreg_megatron.tools.builtin_corpus import ensure_builtin_corpus
from simreg_megatron.tools.events import Run, read_run

MODEL = {"--num-layers": 2, "--hidden-size": 128, "--ffn-hidden-size": 344, "--num-attention-heads": 4,
         "--global-batch-size": 4}  # fmt: skip
PLAIN = "plain Megatron"
OBJECTIVES = {
    PLAIN: ("", ""),
    "cross-entropy, SimReg measured": ("none", ""),
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
LOG_INTERVAL = 10
PAGE = ROOT / "docs" / "objectives.md"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.objectives", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each objective (default: 3)")
    parser.add_argument("--steps", type=int, default=200)
    records.add_options(parser, RESULTS / "objectives.csv")
    options = parser.parse_args()
    measured = None if options.source else _measured(options)
    records.finish(options.source or options.output, measured, table, page=PAGE)


def _measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    corpus = ensure_builtin_corpus(ROOT / "data" / "builtin")
    where = records.surroundings(threads=1, steps=options.steps)
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1, options.seeds + 1):
            for name, (objective, own) in OBJECTIVES.items():
                console.print(f"seed {seed} of {options.seeds}: {name}")
                words = {
                    **MODEL, "--data": corpus.train_prefix, "--tokenizer": corpus.tokenizer_model, "--seed": seed,
                    "--train-iters": options.steps, **({"--simreg-objective": objective} if objective else {}),
                    **({"--simreg-objective-options": own} if own else {}),
                }  # fmt: skip
                run = train(Path(folder, f"{seed}-{name}"), words, options.steps)
                values = {tag: "" if (value := run.last(tag)) is None else f"{value:.6g}" for tag in COLUMNS}
                yield {"objective": name, "weight": objective, "seed": seed, **values, **where}


def train(folder: Path, words: dict[str, object], steps: int) -> Run:
    """One run of the tiny LLaMA, logged and evaluated below `folder`; `words` are further flags and their values."""
    flags = {"--log-interval": LOG_INTERVAL, "--eval-interval": steps, "--save-interval": 10 * steps, **words}
    own = ("--model", "tiny", "--output", folder, *(word for pair in flags.items() for word in pair))
    launched.run(launched.PRETRAIN, own, OMP_NUM_THREADS="1")
    run = read_run(folder / "tensorboard")
    losses = run.scalars["lm loss"].values
    if not all(map(math.isfinite, losses)):
        raise SystemExit(f"a loss is not finite: {losses}")
    return run


def table(lines: list[Record]) -> Iterator[str]:
    width, layers, batch = MODEL["--hidden-size"], MODEL["--num-layers"], MODEL["--global-batch-size"]
    seeds, steps = len({line["seed"] for line in lines}), lines[0]["steps"]
    yield f"{layers} layers of width {width}, {steps} steps of {batch} sequences of 256 tokens, chunks of 64,"
    yield f"**{seeds} seed{'s' if seeds > 1 else ''}**; means, and in brackets the largest less the smallest."
    yield f"{records.described(lines)}. `python -m benchmarks.objectives --seeds {seeds} --steps {steps}`"
    yield ""
    titles = [title for title, _ in COLUMNS.values()]
    yield f"| objective | weight | {' | '.join(titles)} |"
    yield "| --- " * (len(COLUMNS) + 2) + "|"
    for name in dict.fromkeys(line["objective"] for line in lines):
        runs = [line for line in lines if line["objective"] == name]
        cells = [mean_and_spread([_value(line[tag]) for line in runs], form) for tag, (_, form) in COLUMNS.items()]
        weight = {"": "", "none": "0"}.get(runs[0]["weight"], runs[0]["weight"])
        yield f"| {name} | {weight} | {' | '.join(cells)} |"


def _value(text: str) -> float | None:
    return float(text) if text else None


def mean_and_spread(values: Sequence[float | None], form: str) -> str:
    """ "4.250 (0.500)": the mean, and the largest less the smallest where there are several."""
    there = [value for value in values if value is not None]
    if not there:
        return "not logged"
    spread = f" ({max(there) - min(there):{form.lstrip('+')}})" if len(there) > 1 else ""
    return f"{statistics.fmean(there):{form}}{spread}"


if __name__ == "__main__":
    main()
