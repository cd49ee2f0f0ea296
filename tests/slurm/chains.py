# SPDX-License-Identifier: Apache-2.0
"""Chains of tiny Megatron runs, submitted as a user would, and what they logged."""

import json
import re
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.planned import python_path
from simreg_megatron.tools.curves import read_run
from tests.megatron import runs
from tests.slurm.cluster import Cluster

SUBMIT = runs.ROOT / "launch" / "slurm" / "submit.sh"
SCRIPT = "launch/pretrain_llama.sh"
SAVE_INTERVAL = 10
SITE = """\
GPUS_PER_NODE=0
CPUS_PER_TASK=1
TIME=10
LAYOUT=
export OMP_NUM_THREADS=1
"""
_MODEL = (
    *("--simreg-lambda", "1", "--simreg-chunk-size", "24", "--num-layers", "1", "--seq-length", "64"),
    *("--global-batch-size", "4", "--lr-warmup-iters", "5", "--log-interval", "1", "--eval-iters", "1"),
    *("--save-interval", str(SAVE_INTERVAL)),
)


def words(text: Any, iterations: int) -> list[str]:
    """The run's own options: the same function for every caller, two ranks that share four sequences."""
    data = ["--data", str(text.train_prefix), "--tokenizer", str(text.tokenizer_model)]
    return [*data, *_MODEL, "--train-iters", str(iterations)]


def whole_run(text: Any, iterations: int, output: Path) -> tuple[dict[str, dict[int, float]], float]:
    """The scalars of the same run under torchrun, without a break, and the seconds of a step."""
    done = runs.torchrun([SCRIPT, *words(text, iterations), "--output", str(output)], processes=2)
    assert done.status == 0, done.output[-4000:]
    steps = [float(value) for value in re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", done.output)]
    return scalars(output), statistics.median(steps) / 1000


def scalars(output: Path) -> dict[str, dict[int, float]]:
    """Losses and gradient norms of each step, at full precision; of a step that was done twice, the later one."""
    found = read_run(output / "tensorboard").scalars
    tags = ("lm loss", "grad-norm")  # SimReg is in the gradient; its log averages over a start, as Megatron's does
    return {tag: dict(zip(found[tag].steps.tolist(), found[tag].values.tolist(), strict=True)) for tag in tags}


@dataclass
class Chain:
    cluster: Cluster
    output: Path
    job: str

    def ask(self, *command: str) -> str:
        return self.cluster.ask(*command)

    def queue(self) -> str:
        return self.ask("squeue", "--noheader", "--job", self.job, "--format", "%i %T")

    @property
    def save(self) -> Path:
        return self.output / "checkpoints"

    @property
    def log(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted((self.output / "slurm").glob("*.log")))

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.output / "slurm" / "slices.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        events = [json.loads(line) for line in lines]
        return [event for event in events if event["event"] == kind and event["chain"] == self.job]

    def until(self, holds: Callable[[], Any], what: str, *, seconds: float = 240, poll: float = 0.2) -> None:
        end = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > end:
                raise TimeoutError(f"{what}: not in {seconds:.0f} s\n{self.queue()}\n{self.log[-6000:]}")
            time.sleep(poll)

    def wait(self, *, seconds: float = 400) -> None:
        gone = ("", "slurm_load_jobs error: Invalid job id specified")
        self.until(lambda: self.queue() in gone, "the chain's end", seconds=seconds, poll=1)

    def until_saved(self, iteration: int) -> None:
        tracker = self.save / "latest_checkpointed_iteration.txt"
        self.until(lambda: tracker.exists() and int(tracker.read_text() or 0) >= iteration, f"checkpoint {iteration}")

    def ranks(self) -> list[int]:
        marks = (SCRIPT, str(self.output), "--exit-duration-in-mins")
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                command = path.read_text().replace("\0", " ")
                if all(mark in command for mark in marks) and not command.startswith("srun"):
                    found.append(int(path.parent.name))
        return found


def submit(cluster: Cluster, output: Path, run: Sequence[str], *options: str) -> Chain:
    """`bash launch/slurm/submit.sh`; the answer must name a job."""
    settings = output.parent / "cluster.env"
    settings.write_text(SITE)
    command = ["bash", str(SUBMIT), "--cluster", str(settings), "--nodes", "2", "--reserve", "0.5", *options]
    own = {"PYTHONPATH": python_path(runs.ROOT)}
    answer = cluster.ask(*command, SCRIPT, *run, "--output", str(output), environment=own)
    match = re.search(r"as job (\d+)", answer)
    assert match, answer
    return Chain(cluster, output, match[1])
