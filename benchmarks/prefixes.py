# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.prefixes [--seeds 3] [--steps 400]`: what the first features of a state are worth alone.

Real runs of launch/pretrain_llama.sh, the tiny model on the built-in corpus, the objectives taking turns within each
seed. Each trained model is then measured on validation text through the first features of its states and of its output
layer alone. One weight each, not tuned.

A row of OUTPUT is one run, written when it is finished; the table beside it (.md) is made from the rows. Started again,
it goes on with the runs that are not there yet.
"""

from __future__ import annotations

import argparse
import csv
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from benchmarks import records
from benchmarks.objectives import ROOT, mean_and_spread, train
from simreg_megatron.tools.builtin_corpus import BuiltinCorpus, ensure_builtin_corpus
from simreg_megatron.tools.export_hf import export
from simreg_megatron.tools.folders import checkpoint_folder

WIDTH, PREFIXES, LENGTH = 192, (48, 96), 256  # of the tiny model, and the features that are measured
TOKENS = 32_768  # of the validation text, that each number of features is measured on
RUNS = {
    "cross-entropy alone": ("", ""),
    "SimReg": ("simreg:1", ""),
    "SimReg on prefixes": ("simreg:1", "simreg.prefixes=48/96/192"),
    "MIC": ("mic:0.05", "mic.prefixes=48/96"),
    "prefixes-ce": ("prefixes-ce:1", "prefixes-ce.prefixes=48/96"),
}
FIELDS = {
    **{f"loss_{width}": f"first {width}" for width in PREFIXES},
    f"loss_{WIDTH}": f"all {WIDTH}",
    "validation_loss": "validation loss",
}
SURROUNDINGS = ("date", "commit", "machine", "cores", "threads", "python", "torch", "megatron_core")
COLUMNS = ("run", "objective", "options", "seed", "steps", *FIELDS, "tokens", *SURROUNDINGS)
Row = dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefixes", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each objective (default: 3)")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "prefixes.csv", metavar="FILE")
    options = parser.parse_args()
    os.nice(10)
    torch.set_num_threads(1)
    corpus = ensure_builtin_corpus(ROOT / "data" / "builtin")
    for seed in range(1, options.seeds + 1):
        for name in RUNS:
            asked = (name, *RUNS[name], str(options.steps)), str(seed)
            if asked not in [(_settings(row), row["seed"]) for row in read(options.output)]:
                append(options.output, run(name, seed, options.steps, corpus))
                write_table(options.output)
    write_table(options.output)
    print(options.output.with_suffix(".md").read_text(encoding="utf-8"))


def run(name: str, seed: int, steps: int, corpus: BuiltinCorpus) -> Row:
    """Train, export, measure."""
    objective, own = RUNS[name]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        words = {
            "--data": corpus.train_prefix, "--valid-data": corpus.valid_prefix, "--tokenizer": corpus.tokenizer_model,
            "--seed": seed, "--train-iters": steps, "--save": folder / "checkpoints", "--save-interval": steps,
            **({"--simreg-objective": objective} if objective else {}),
            **({"--simreg-objective-options": own} if own else {}),
        }  # fmt: skip
        logged = train(folder, words, steps)
        export(checkpoint_folder(folder / "checkpoints"), folder / "model", dtype="fp32")
        losses = measure(folder / "model", Path(corpus.valid_prefix))
    return {
        "run": name, "objective": objective, "options": own, "seed": str(seed), "steps": str(steps),
        **{f"loss_{width}": f"{loss:.4f}" for width, loss in losses.items()},
        "validation_loss": f"{logged.last('lm loss validation'):.4f}", "tokens": str(TOKENS),
        **{column: str(value) for column, value in records.surroundings(threads=1).items()},
    }  # fmt: skip


@torch.inference_mode()
def measure(model: Path, prefix: Path) -> dict[int, float]:
    """Cross-entropy of TOKENS tokens of a prepared set in windows of LENGTH, from the first features alone, by number.

    The logits are those of the first so many features of the final states and of the output layer's rows.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from transformers import AutoModelForCausalLM

    documents = IndexedDataset(str(prefix))
    tokens = torch.cat([torch.from_numpy(documents[number].astype("int64")) for number in range(len(documents))])
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    head, widths = network.get_output_embeddings().weight, (*PREFIXES, WIDTH)
    sums = dict.fromkeys(widths, 0.0)
    for start in range(0, TOKENS, LENGTH):
        window = tokens[start : start + LENGTH + 1]
        states = network(window[None, :-1], use_cache=False, output_hidden_states=True).hidden_states[-1][0]
        for width in widths:
            logits = states[:, :width] @ head[:, :width].T
            sums[width] += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
    return {width: total / TOKENS for width, total in sums.items()}


def read(path: Path) -> list[Row]:
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def append(path: Path, row: Row) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.is_file()
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def write_table(path: Path) -> None:
    text = "\n".join(table(read(path))) + "\n"
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    records.quote(path, text, ROOT / "docs" / "objectives.md")


def table(rows: Iterable[Row]) -> Iterator[str]:
    """Markdown: a line for each objective and number of steps, over as many seeds as are there."""
    of_run: dict[tuple[str, ...], list[Row]] = {}
    rows = list(rows)
    for row in rows:
        of_run.setdefault(_settings(row), []).append(row)
    yield "Nats per token; means over the seeds, and in brackets the largest less the smallest."
    yield f"{records.described(rows)}. `python -m benchmarks.prefixes`"
    yield ""
    yield f"| objective | weight | steps | seeds | {' | '.join(FIELDS.values())} |"
    yield "| --- " * (4 + len(FIELDS)) + "|"
    for (name, weight, _, steps), found in of_run.items():
        cells = [mean_and_spread([float(row[field]) for row in found], ".3f") for field in FIELDS]
        yield f"| {name} | {weight or 0} | {steps} | {len(found)} | {' | '.join(cells)} |"


def _settings(row: Row) -> tuple[str, ...]:
    """What all seeds share."""
    return tuple(row[field] for field in ("run", "objective", "options", "steps"))


if __name__ == "__main__":
    main()
