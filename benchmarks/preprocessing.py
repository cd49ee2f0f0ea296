# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.preprocessing MEGATRON_TREE TEXT.jsonl TOKENIZER...`: `data prepare` beside Megatron's.

Both tokenize the same lines with one worker, by turns, all their processes on one core. Compared are the seconds of
processor time of all their processes, less what the same command takes for a single line (its start); and the bytes
written, which must be equal. Each turn is a line of benchmarks/results/preprocessing.csv; the table in docs/data.md is
made of that file (`--from FILE.csv`).
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.records import RESULTS, ROOT, Record
from simreg_megatron.installed import python_path

TOOLS = {"theirs": "Megatron's tool", "ours": "data prepare"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path, nargs="?", help="a Megatron-LM source tree")
    parser.add_argument("text", type=Path, nargs="?", help="one JSON object a line, with a text")
    parser.add_argument("tokenizers", nargs="*", help=".model files or Hugging Face folders")
    parser.add_argument("--repeats", type=int, default=3)
    records.add_options(parser, RESULTS / "preprocessing.csv")
    options = parser.parse_args()
    if not (options.source or options.tokenizers):
        parser.error("a Megatron-LM source tree, a text and a tokenizer are needed, or --from FILE.csv")
    measured = None if options.source else _measured(options)
    records.finish(options.source or options.output, measured, table, page=ROOT / "docs" / "data.md")


def _measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    where = records.surroundings(threads=1)
    for tokenizer in options.tokenizers:
        for found in _turns(options.tree.absolute(), options.text, tokenizer, options.repeats):
            yield found | where


def _turns(tree: Path, text: Path, tokenizer: str, repeats: int) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        line = folder / "line.jsonl"
        with text.open("rb") as stream:
            line.write_bytes(stream.readline())
        for turn in range(repeats):
            found: dict[str, Any] = {
                "tokenizer": Path(tokenizer).name, "megabytes": round(text.stat().st_size / 1e6, 1), "turn": turn
            }  # fmt: skip
            outputs = {who: folder / f"{who}-{turn}" for who in TOOLS}
            for who, output in outputs.items():
                found[f"{who}_start_s"] = round(run(who, tree, line, tokenizer, folder / f"{who}-{turn}-line"), 3)
                found[f"{who}_s"] = round(run(who, tree, text, tokenizer, output), 3)
            yield found | {"same_bytes": "yes" if _are_equal(outputs) else "NO"}


def _are_equal(outputs: dict[str, Path]) -> bool:
    return all(
        Path(f"{outputs['theirs']}_text_document{ending}").read_bytes()
        == (outputs["ours"] / f"train{ending}").read_bytes()
        for ending in (".bin", ".idx")
    )


def table(lines: list[Record]) -> Iterator[str]:
    yield "MB/s of JSON per second of processor time, medians, the start of the programs taken off."
    yield f"{records.described(lines)}. `python -m benchmarks.preprocessing`"
    yield ""
    yield f"| tokenizer | text | turns | {' | '.join(TOOLS.values())} | times as fast | same .bin and .idx |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for tokenizer in dict.fromkeys(line["tokenizer"] for line in lines):
        turns = [line for line in lines if line["tokenizer"] == tokenizer]
        megabytes = float(turns[0]["megabytes"])
        theirs, ours = (megabytes / (_median(turns, f"{who}_s") - _median(turns, f"{who}_start_s")) for who in TOOLS)
        same = "yes" if all(line["same_bytes"] == "yes" for line in turns) else "NO"
        speeds = f"{theirs:.2f} | {ours:.2f} | {ours / theirs:.2f}"
        yield f"| {tokenizer} | {megabytes:.1f} MB | {len(turns)} | {speeds} | {same} |"


def _median(lines: list[Record], column: str) -> float:
    return statistics.median(float(line[column]) for line in lines)


def run(who: str, tree: Path, text: Path, tokenizer: str, output: Path) -> float:
    """Seconds of processor time, of the command and of all it started."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = dict(os.environ)
    if who == "theirs":
        environment["PYTHONPATH"] = python_path(tree)
        sentencepiece = tokenizer.endswith(".model")
        words = [
            *(str(tree / "tools" / "preprocess_data.py"), "--input", str(text), "--output-prefix", str(output)),
            *("--append-eod", "--workers", "1", "--tokenizer-model", tokenizer, "--tokenizer-type"),
            *(["SentencePieceTokenizer"] if sentencepiece else ["HuggingFaceTokenizer"]),
            *([] if sentencepiece else ["--tokenizer-hf-no-include-special-tokens"]),
        ]
    else:
        words = [
            *("-m", "simreg_megatron.cli", "data", "prepare", str(text), "--tokenizer", tokenizer),
            *("--out", str(output), "--valid-share", "0", "--workers", "1"),
        ]
    subprocess.run([sys.executable, *words], env=environment, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


if __name__ == "__main__":
    main()
