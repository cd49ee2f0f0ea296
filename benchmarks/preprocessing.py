# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.preprocessing MEGATRON_TREE TEXT.jsonl TOKENIZER...`: `data prepare` beside Megatron's.

Both tokenize the same lines with one worker, by turns, all their processes on one core. Compared are the seconds of
processor time of all their processes, less what the same command takes for a single line (its start); and the bytes
written, which must be equal.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path, help="a Megatron-LM source tree")
    parser.add_argument("text", type=Path, help="one JSON object a line, with a text")
    parser.add_argument("tokenizers", nargs="+", help=".model files or Hugging Face folders")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    print(
        "| tokenizer | Megatron's tool, MB/s | data prepare, MB/s | times as fast | same bytes |\n|---|---|---|---|---|"
    )
    for tokenizer in options.tokenizers:
        print(row(options.tree.absolute(), options.text, tokenizer, options.repeats), flush=True)


def row(tree: Path, text: Path, tokenizer: str, repeats: int) -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        line = folder / "line.jsonl"
        with text.open("rb") as stream:
            line.write_bytes(stream.readline())
        seconds: dict[str, list[float]] = {"theirs": [], "ours": []}
        starts: dict[str, list[float]] = {"theirs": [], "ours": []}
        equal = True
        for turn in range(repeats):
            outputs = {}
            for who in seconds:
                starts[who].append(run(who, tree, line, tokenizer, folder / f"{who}-{turn}-line"))
                outputs[who] = folder / f"{who}-{turn}"
                seconds[who].append(run(who, tree, text, tokenizer, outputs[who]))
            for ending in (".bin", ".idx"):
                theirs = Path(f"{outputs['theirs']}_text_document{ending}").read_bytes()
                equal = equal and theirs == (outputs["ours"] / f"train{ending}").read_bytes()
    megabytes = text.stat().st_size / 1e6
    median = statistics.median
    theirs, ours = (megabytes / (median(seconds[who]) - median(starts[who])) for who in ("theirs", "ours"))
    print(f"{tokenizer}: seconds {seconds}, of which the start {starts}", file=sys.stderr)
    return f"| {Path(tokenizer).name} | {theirs:.2f} | {ours:.2f} | {ours / theirs:.2f} | {'yes' if equal else 'NO'} |"


def run(who: str, tree: Path, text: Path, tokenizer: str, output: Path) -> float:
    """Seconds of processor time, of the command and of all it started."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = dict(os.environ)
    if who == "theirs":
        environment["PYTHONPATH"] = str(tree)
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
