# SPDX-License-Identifier: Apache-2.0
"""The two calls of `make gpu`, as stages of parts that run side by side; every part is a command that anyone can type.

Call a asks whether everything is right, call b how fast it is: there each part has the GPU for itself.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.records import ROOT
from simreg_megatron.losses.simreg import FAST_IMPLS

CALLS = {"a": "is it right?", "b": "how fast is it?"}
WORKERS = max(1, min(12, len(os.sched_getaffinity(0)) - 4))  # tests of one GPU at a time: each takes a core
_PYTHON = (sys.executable, "-m")
_LLAMA = ("bash", "launch/pretrain_llama.sh")
_PYTEST = ("-q", "-rfEs", "-p", "no:cacheprovider", "-o", "junit_family=xunit2")
# A step of one process that takes a fraction of a second on a CPU.
_SMALL = (
    "--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2", "--ffn-hidden-size", "64",
    "--seq-length", "64", "--max-position-embeddings", "64", "--micro-batch-size", "2", "--global-batch-size", "2",
)  # fmt: skip
_350M = (
    "--model", "350m", "--micro-batch-size", "4", "--global-batch-size", "4", "--save", "",
    "--make-vocab-size-divisible-by", "32000",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A command, and how it is judged.

    Attributes:
        name: of the part and of its files: NAME.log and what it writes.
        commands: the second runs if the first runs out of GPU memory, and so on.
        seconds: its time limit, in a call of 450 s or less.
        leaves: a file without which it did not run to its end, even if its status is fine.
        fine: statuses of a part that ran to its end; pytest ends with 1 if a test fails, with 5 if it selects none.
    """

    name: str
    commands: tuple[tuple[str, ...], ...]
    seconds: float = 100
    leaves: str = ""
    fine: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Setting:
    """The folders of results and of caches, the launcher's arguments for the text, whether all is tiny and on a CPU."""

    output: Path
    scratch: Path
    text: tuple[str, ...]
    pretend: bool = False

    def stages(self, call: str) -> Iterator[list[Part]]:
        return self._right() if call == "a" else ([part] for part in self._fast())

    def _right(self) -> Iterator[list[Part]]:
        steps, simreg = ("--train-iters", "6" if self.pretend else "60"), ("--simreg-lambda", "1")
        saving = ("--recipe", "paper", "--train-iters", "12", "--save-interval", "6")
        demo = ("launch/demo.py", "--steps", steps[1], "--output", str(self.scratch / "demo"))
        yield [
            Part("doctor", ((*_PYTHON, "simreg_megatron.cli", "doctor", *(() if self.pretend else ("--gpu",))),), 150),
            self._training("plain", *_LLAMA, *steps),
            self._training("simreg", *_LLAMA, *steps, *simreg),
            self._training("launch", "torchrun", _LLAMA[1], *steps, *simreg),  # as README has it
            self._training("mixtral", "bash", "launch/pretrain_mixtral.sh", *steps, *simreg),
            self._training("save", *_LLAMA, *saving, "--exit-interval", "6", run="saved"),
            Part("demo", ((sys.executable, *demo),), 240),
        ]
        yield list(self._tests())
        yield [
            self._training("resume", *_LLAMA, *saving, "--auto-resume", run="saved"),
            self._training("350m", *_LLAMA, *steps, "--recipe", "paper", *(() if self.pretend else _350M)),
            *self._sanitizers(),
        ]

    def _fast(self) -> Iterator[Part]:
        few, more = ("42", "42") if self.pretend else ("201", "401")
        profile = ("--profile", str(self.output / "pairs-350m.profile.json"))
        if not self.pretend:  # both need a GPU
            yield self._form("triton")
            host = ("--output", str(self.output / "host.csv"))
            yield Part("host", ((*_PYTHON, "benchmarks.host", *host),), leaves="host.csv")
            tiles = str(self.output / "tiles.csv")
            yield Part("tiles", ((*_PYTHON, "benchmarks.gpu.tiles", tiles, "--seconds", "80"),), leaves="tiles.csv")
        yield self._steps("pairs-350m", 16, "--kinds", "chunks", "--steps", more, *profile)
        yield self._steps("pairs-1.3b", 8, "--kinds", "chunks", "--steps", few)
        yield self._steps("pairs-350m-control", 16, "--kinds", "nearly", "--steps", more)
        yield self._steps("pairs-350m-whole", 16, "--kinds", "whole", "--steps", few)
        yield self._form("tiled")
        yield self._form("reference")

    def _form(self, impl: str) -> Part:
        file = f"forms-{impl}.csv"
        return Part(f"forms-{impl}", ((*_PYTHON, "benchmarks.gpu.forms", impl, str(self.output / file)),), leaves=file)

    def _training(self, name: str, *words: str, run: str = "") -> Part:
        """A run of a launch script, with folders of its own."""
        folder = self.scratch / (run or name)
        own = ("--output", str(folder), "--data-cache-path", str(folder / "cache"), *self.text)
        return Part(name, ((*words[:2], *own, *(_SMALL if self.pretend else ()), *words[2:]),))

    def _tests(self) -> Iterator[Part]:
        """A file each, and the forms one by one: what breaks the device fails every later test of its process."""
        for file in sorted(path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")):
            stem = file.removeprefix("test_").removesuffix(".py").replace("_", "-")
            workers = ("-n", str(WORKERS)) if stem == "one-gpu" else ()
            for impl in FAST_IMPLS if stem == "forms" else ("",):
                name = "-".join(filter(None, ("tests", stem, impl)))
                chosen = (*(("-k", impl) if impl else workers), f"--junitxml={self.output / name}.xml")
                command = (*_PYTHON, "pytest", f"tests/gpu/{file}", *_PYTEST, *chosen)
                yield Part(name, (command,), 240, f"{name}.xml", (0, 1, 5))

    def _sanitizers(self) -> Iterator[Part]:
        """A test of each form under the checkers of memory accesses and, if it has kernels of its own, of races."""
        for tool, impls in (("memcheck", FAST_IMPLS), ("racecheck", ("triton",))):
            for impl in impls if shutil.which("compute-sanitizer") and not self.pretend else ():
                checker = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *_PYTHON)
                test = ("pytest", "tests/gpu/test_forms.py", "-k", f"strides and {impl}", *_PYTEST)
                yield Part(f"{tool}-{impl}", ((*checker, *test),))

    def _steps(self, name: str, batch: int, *words: str) -> Part:
        """Pairs of steps with the largest of the micro-batches `batch`, a half of it ... 1 that fits."""
        model, output = "tiny" if self.pretend else name.split("-")[1], str(self.output / f"{name}.csv")
        words += ("--seconds", "180", *self.text, "--flags")  # what is measured by then is kept
        common = ("benchmarks.step_pairs", "--model", model, "--output", output, *words)
        batches = (batch >> half for half in range(batch.bit_length()))
        flags = (f"--micro-batch-size {each} --global-batch-size {each}" for each in batches)
        each_way = [" ".join(_SMALL)] if self.pretend else flags
        return Part(name, tuple((*_PYTHON, *common, each) for each in each_way), 200, f"{name}.csv")
