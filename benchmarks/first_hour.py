# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.first_hour TREE [--demo]`: the first hour with the project, as a stranger would have it, timed.

Three walks: from a clone to the demo's figure (--demo; minutes); the flag in front of a Megatron job that runs already
(TREE is a Megatron-LM source tree), seen in its log; and a folder of text to a finished chain of jobs on a SLURM of two
nodes that is started for it (as root, with SLURM's packages; left out where they are missing). Every walk fails where a
command does, or where what it should have shown is not there.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import records
from benchmarks.records import RESULTS, ROOT, Record
from simreg_megatron.tools.builtin_corpus import ensure_builtin_corpus
from tests.megatron import text as texts
from tests.slurm import cluster as clusters

BIN = Path(sys.executable).parent
MODEL = shlex.split(
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --global-batch-size 2 --train-iters 20 --lr 1e-3 --min-lr 1e-4 --lr-warmup-iters 2 "
    "--lr-decay-style cosine --eval-iters 1 --eval-interval 100 --log-interval 1 --seed 1 --simreg-cpu"
)
SITE = "GPUS_PER_NODE=0\nGPU_REQUEST=\nSBATCH_EXTRA=\nCPUS_PER_TASK=1\nLAYOUT=\nTIME=5\nexport OMP_NUM_THREADS=1\n"
Step = tuple[str, str, float]  # the walk, what was reached, seconds from the step before


def run(command: list[str], *, cwd: Path = ROOT, shows: str = "") -> tuple[str, float]:
    """What a command prints, and its seconds."""
    started = time.monotonic()
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode or shows not in done.stdout:
        raise SystemExit(f"{' '.join(command)}: exit {done.returncode}, {shows!r} missing\n{done.stdout[-3000:]}")
    return done.stdout, time.monotonic() - started


def demo() -> Iterator[Step]:
    """git clone, make demo."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "project"
        run(["git", "clone", "-q", str(ROOT), str(clone)])
        _, seconds = run(["make", "demo"], cwd=clone, shows="One seed, and the baseline was not tuned")
        yield "the demo", "set up, two models trained, compared and drawn", seconds


def flag_in_a_job(tree: Path) -> Iterator[Step]:
    """Look, run without the plugin, run with lambda 0, run with lambda 10."""
    walk = "the flag in a job"
    script = tree / "pretrain_gpt.py"
    _, seconds = run([str(BIN / "simreg-megatron"), "doctor", "--script", str(script)], shows="SimReg can be installed")
    yield walk, "`doctor` names what would be wrapped", seconds
    corpus = ensure_builtin_corpus(ROOT / "data" / "builtin")
    data = ["--data-path", str(corpus.train_prefix), "--split", "99,1,0", "--tokenizer-type", "SentencePieceTokenizer"]
    data += ["--tokenizer-model", str(corpus.tokenizer_model)]
    start = [str(BIN / "torchrun"), "--nproc-per-node", "1", "-m", "simreg_megatron"]
    losses = []
    for before, flags, shows in (
        (["--plain"], [], "lm loss"),
        ([], ["--simreg-lambda", "0"], "lm loss"),
        ([], ["--simreg-lambda", "10"], "simreg loss"),
    ):
        said, seconds = run([*start, *before, "pretrain_gpt.py", *MODEL, *data, *flags], cwd=tree, shows=shows)
        losses.append(said.rpartition("| lm loss: ")[2].partition(" ")[0])
        yield walk, f"20 steps {' '.join(flags) or 'without the plugin'}", seconds
    if losses[0] != losses[1] or losses[1] == losses[2]:
        raise SystemExit(f"the last losses plain, with lambda 0 and with lambda 10 are {losses}")


def chain() -> Iterator[Step]:
    """A folder of .jsonl, prepared, submitted, ended."""
    walk = "a chain of jobs"
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "texts").mkdir()
        lines = (json.dumps({"text": document}) + "\n" for document in texts.documents())
        (place / "texts" / "some.jsonl").write_text("".join(lines))
        (place / "cpu.env").write_text(SITE)
        with clusters.running(place / "cluster") as slurm:
            started = time.monotonic()
            data, output = place / "data", place / "runs" / "tiny"
            slurm.ask(
                "bash", "launch/prepare_data.sh", str(place / "texts"), "--train-tokenizer", "512", "--out", str(data)
            )
            yield walk, "text prepared", time.monotonic() - started
            started = time.monotonic()
            said = slurm.ask(
                "bash", "launch/slurm/submit.sh", "--cluster", str(place / "cpu.env"), "--nodes", "2", "--time", "5",
                "--reserve", "1", "launch/pretrain_llama.sh", "--simreg-lambda", "1", "--data", str(data / "train"),
                "--valid-data", str(data / "valid"), "--tokenizer", str(data / "tokenizer.model"), "--train-iters",
                "100", "--save-interval", "20", "--output", str(output),
            )  # fmt: skip
            if "as job" not in said:
                raise SystemExit(said)
            yield walk, "submitted", time.monotonic() - started
            logs = output / "slurm"
            for what, reached in (
                (
                    "first SimReg loss in the log",
                    lambda: any("simreg loss" in p.read_text() for p in logs.glob("*.log")),
                ),
                ("100 steps on two nodes, chain ended", (output / "ended.json").exists),
            ):
                started = time.monotonic()
                while not reached():
                    if time.monotonic() - started > 600:
                        raise SystemExit(f"not in ten minutes: {what}")
                    time.sleep(0.5)
                yield walk, what, time.monotonic() - started


def rows(tree: Path, *, with_demo: bool) -> Iterator[Record]:
    where = {name: str(value) for name, value in records.surroundings(threads=2).items()}
    walks = [*([demo()] if with_demo else []), flag_in_a_job(tree), *([] if clusters.missing() else [chain()])]
    for walk in walks:
        for name, reached, seconds in walk:
            yield {"walk": name, "reached": reached, "seconds": f"{seconds:.1f}", **where}


def table(lines: list[Record]) -> Iterator[str]:
    yield f"{records.described(lines)}. `python -m benchmarks.first_hour TREE --demo`"
    yield ""
    yield "| walk | reached | seconds |"
    yield "| --- | --- | --- |"
    for line in lines:
        yield f"| {line['walk']} | {line['reached']} | {line['seconds']} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_hour",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tree", type=Path, nargs="?", help="a Megatron-LM source tree whose data helpers are built")
    parser.add_argument("--demo", action="store_true", help="the first walk, too")
    records.add_options(parser, RESULTS / "first_hour.csv")
    options = parser.parse_args()
    if options.tree is None and options.source is None:
        parser.error("name a Megatron-LM source tree, for example a clone of core_v0.19.0")
    measured = None if options.source else rows(options.tree.absolute(), with_demo=options.demo)
    records.finish(options.source or options.output, measured, table, page=_PAGE)


_PAGE = ROOT / "docs" / "first-hour.md"

if __name__ == "__main__":
    main()
