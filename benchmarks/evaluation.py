# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.evaluation`: from three trainings to a table of scores, as docs/evaluation.md describes it.

Three LLaMAs of the preset `tiny` are trained on the built-in text in float32, one process and one seed each; then
`simreg-megatron evaluate` asks them questions made from held-out documentation (which of four continuations is the
right one) and takes their loss on the whole validation set. What it found is in benchmarks/results/evaluation.csv and
.md.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.objectives import ROOT, train
from simreg_megatron.evaluation.results import ModelResults, read
from simreg_megatron.tools.builtin_corpus import BuiltinCorpus, ensure_builtin_corpus
from simreg_megatron.tools.docstrings import is_validation, library_roots, read_documents
from tests.helpers.questions import NAME, write_task

MODELS: dict[str, dict[str, object]] = {
    "cross-entropy": {"--simreg-objective": "none"},
    "simreg-chunk": {"--simreg-lambda": 1, "--simreg-chunk-size": 64},
    "simreg-whole": {"--simreg-lambda": 1, "--simreg-chunk-size": 0},
}
STEPS, SEED, WINDOW, FEATURES, QUESTIONS = 400, 1234, 256, (96, 48), 500
Row = dict[str, object]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evaluation", description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help="of each training (default: 400, as in make demo)")
    parser.add_argument("--questions", type=int, default=QUESTIONS)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", metavar="FOLDER")
    options = parser.parse_args()
    corpus = ensure_builtin_corpus(ROOT / "data" / "builtin")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        during = {model: _train(folder / model, corpus, flags, options.steps) for model, flags in MODELS.items()}
        found = _evaluate(folder, corpus, options.questions)
    rows = [row(model, during[model.name], options.steps) for model in found]
    with (options.output / "evaluation.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    text = "\n".join(table(rows)) + "\n"
    (options.output / "evaluation.md").write_text(text, encoding="utf-8")
    print(text)


def _train(folder: Path, corpus: BuiltinCorpus, flags: dict[str, object], steps: int) -> float:
    """The loss of Megatron's own last evaluation."""
    words = {
        "--data": corpus.train_prefix, "--tokenizer": corpus.tokenizer_model, "--seed": SEED, "--train-iters": steps,
        "--save": folder / "checkpoints", "--save-interval": steps, **flags,
    }  # fmt: skip
    loss = train(folder, words, steps).last("lm loss validation")
    assert loss is not None
    return loss


def _evaluate(folder: Path, corpus: BuiltinCorpus, questions: int) -> list[ModelResults]:
    texts = [text for name, text in read_documents(library_roots()) if is_validation(name)]
    write_task(folder / "task", texts, questions)
    words = [
        *(word for model in MODELS for word in ("--model", f"{model}={folder / model / 'checkpoints'}")),
        *("--tokenizer", corpus.tokenizer_model, "--data", corpus.valid_prefix, "--seq-length", WINDOW),
        *("--features", ",".join(map(str, FEATURES)), "--tasks", NAME, "--include", folder / "task"),
        *("--dtype", "float32", "--offline", "--output", folder / "scores"),
    ]
    subprocess.run([sys.executable, "-m", "simreg_megatron.cli", "evaluate", *map(str, words)], cwd=ROOT, check=True)
    return read(folder / "scores" / "results.json")[0]


def row(model: ModelResults, during: float, steps: int) -> Row:
    """One model: how it was trained, and each figure with the sample that it is of."""
    score, losses = model.scores[NAME], {held.features: held for held in model.perplexities}
    whole = max(losses)
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "model": model.name,
        "flags": " ".join(str(word) for pair in MODELS[model.name].items() for word in pair),
        "steps": steps,
        "seed": SEED,
        "questions": score.questions,
        "right": score.value,
        "right_error": score.error,
        "valid_tokens": losses[whole].tokens,
        "loss": losses[whole].loss,
        **{f"loss_{number}": losses[number].loss for number in FEATURES},
        "loss_in_training": during,
    }


def table(rows: Sequence[Row]) -> Iterator[str]:
    first = rows[0]
    yield (
        f"{first['date']}, `python -m benchmarks.evaluation`: LLaMAs of the preset tiny (4 layers of width 192), one "
        f"process, {first['steps']} steps, seed {SEED}; float32 on a CPU. *right* is of {first['questions']} questions "
        "about held-out documentation, with its standard error; the losses are of all "
        f"{first['valid_tokens']} tokens of the built-in validation set, in windows of {WINDOW}; *in training* is "
        "Megatron's own last evaluation, of a sample of it (10 batches of 8 windows), which is also what `make demo` "
        "prints."
    )
    yield ""
    yield f"| model | right (%) | loss | {' | '.join(f'from {number} features' for number in FEATURES)} | in training |"
    yield "| --- " * (4 + len(FEATURES)) + "|"
    for found in rows:
        of_features = " | ".join(f"{found[f'loss_{number}']:.3f}" for number in FEATURES)
        right = f"{100 * float(str(found['right'])):.1f} ({100 * float(str(found['right_error'])):.1f})"
        yield (
            f"| {found['model']} | {right} | {found['loss']:.4f} | {of_features} | {found['loss_in_training']:.4f} |"
        )


if __name__ == "__main__":
    main()
