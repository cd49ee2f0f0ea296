# SPDX-License-Identifier: Apache-2.0
"""One training of the benchmarks, by torchrun on one process."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence

from benchmarks.records import ROOT, Record

PRETRAIN = "launch/pretrain_llama.sh"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--flags", type=shlex.split, default=[], metavar="WORDS",
        help="Megatron's flags for every run, such as '--micro-batch-size 2 --global-batch-size 2'",
    )  # fmt: skip


def of_model(model: str) -> tuple[str, ...]:
    """One micro-batch a step: what a step costs beside it (the optimizer) is the same in all kinds.

    No checkpoint: that of a real size takes gigabytes, and is saved where temporary files are.
    """
    if model == "tiny":
        return ()
    batch = ("--micro-batch-size", "8", "--global-batch-size", "8")
    return ("--make-vocab-size-divisible-by", "32000", *batch, "--save", "")


def flags_of(lines: Sequence[Record]) -> str:
    """The option, as typed, that gave the runs of these lines more flags."""
    flags = lines[0].get("flags")  # lines of old have no such column
    return f" --flags {shlex.quote(flags)}" if flags else ""


def run(script: str, words: Iterable[object], **environment: str) -> str:
    """What `script` of the repository printed; it runs in the environment of this process and what is given.

    Raises:
        SystemExit: it ended with another status than 0.
    """
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    command = [str(word) for word in (*torchrun, script, *words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment})
    if done.returncode:
        raise SystemExit(f"a run ended with status {done.returncode}:\n{done.stdout[-8000:]}{done.stderr[-8000:]}")
    return done.stdout
