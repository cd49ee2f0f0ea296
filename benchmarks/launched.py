# SPDX-License-Identifier: Apache-2.0
"""One training of the benchmarks, by torchrun on one process."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks import records
from benchmarks.records import ROOT, Record
from simreg_megatron.tools.builtin_corpus import ensure_builtin_corpus
from tests.helpers import jobs


def add_text(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", metavar="PREFIX", help="tokenized text: PREFIX.bin and .idx (default: the built-in)")
    parser.add_argument("--tokenizer", metavar="FILE", help="what it was tokenized with")


def text(options: argparse.Namespace) -> tuple[str, ...]:
    """The launcher's arguments for the text that is given, or for the built-in one, which is made if it is not there.

    Raises:
        SystemExit: one of --data and --tokenizer is given without the other.
    """
    if bool(options.data) != bool(options.tokenizer):
        raise SystemExit("error: --data PREFIX and --tokenizer FILE belong together: give both, or neither")
    if options.data:
        return ("--data", options.data, "--tokenizer", options.tokenizer)
    corpus = ensure_builtin_corpus(ROOT / "data" / "builtin")
    return ("--data", str(corpus.train_prefix), "--tokenizer", str(corpus.tokenizer_model))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="tiny", help="a preset of launch/models (default: tiny)")
    parser.add_argument("--kinds", default="", metavar="WORDS", help="only those whose name holds one: chunks,whole")
    parser.add_argument(
        "--flags", type=shlex.split, default=[], metavar="WORDS",
        help="more arguments of the launcher for every run, such as '--micro-batch-size 2 --global-batch-size 2'",
    )  # fmt: skip
    add_text(parser)


def surroundings(options: argparse.Namespace) -> dict[str, Any]:
    threads = os.environ.get("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    return records.surroundings(threads=threads, model=options.model, flags=shlex.join(options.flags))


def chosen(kinds: dict[str, tuple[str, ...]], words: str) -> dict[str, tuple[str, ...]]:
    wanted = [word for word in words.split(",") if word]
    return {name: flags for name, flags in kinds.items() if not wanted or any(word in name for word in wanted)}


def of_model(model: str) -> tuple[str, ...]:
    """One micro-batch a step: what else a step costs (the optimizer) is the same in all kinds.

    The FFN is aligned: the presets' widths are odd, and products of odd widths are slow with SimReg and without.
    No checkpoint: that of a real size takes gigabytes, and is saved where temporary files are.
    """
    if model == "tiny":
        return ()
    batch = ("--micro-batch-size", "8", "--global-batch-size", "8")
    sizes = ("--make-vocab-size-divisible-by", "32000", "--ffn", "aligned", *batch)
    return (*sizes, "--save", "", "--no-create-attention-mask-in-dataloader")


def options_of(lines: Sequence[Record]) -> str:
    """The options, as typed, that gave the runs of these lines their model and more flags."""
    model, flags = lines[0]["model"], lines[0].get("flags")  # the first lines that were kept have no such column
    return f"{'' if model == 'tiny' else f' --model {model}'}{f' --flags={shlex.quote(flags)}' if flags else ''}"


def run(words: Iterable[object], seconds: float = math.inf, **environment: str) -> None:
    """Run benchmarks/train.py in this process's environment plus what is given.

    Args:
        seconds: time after which the run is killed, which is no error.

    Raises:
        SystemExit: it ended with another status than 0.
    """
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    command = [str(word) for word in (*torchrun, "benchmarks/train.py", *words)]
    try:
        done = jobs.run(command, cwd=ROOT, env={**os.environ, **environment}, merged=True, timeout=seconds)
    except jobs.HungError:
        return
    if done.returncode:
        raise SystemExit(f"a run ended with status {done.returncode}:\n{done.stdout[-8000:]}")
