# SPDX-License-Identifier: Apache-2.0
"""What `make gpu` runs, part by part; every part is a command of its own, which anyone can type."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.records import ROOT
from simreg_megatron.kernels.contrast import MODULES

FORMS, ON_CPU = ("reference", *MODULES), ("reference", "tiled")
MACHINE = "machine"
# A step of one process that takes seconds on a CPU.
_SMALL = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 64 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 2"
)


@dataclass(frozen=True)
class Part:
    """A command, and how it is judged.

    Attributes:
        name: of the part and of its files: NAME.log, NAME.json and what it writes.
        commands: after `python -m`; the second where the first runs out of GPU memory, and so on.
        minutes: that it may take.
        fine: statuses of a part that ran to its end; pytest ends with 1 where a test fails, 5 where it selects none.
        environment: beside that of this process.
        leaves: a file without which it did not run to its end, whatever its status says.
    """

    name: str
    commands: tuple[tuple[str, ...], ...]
    minutes: float
    fine: tuple[int, ...] = (0,)
    environment: dict[str, str] = field(default_factory=dict)
    leaves: str = ""

    def command_lines(self) -> list[list[str]]:
        return [[sys.executable, "-m", *command] for command in self.commands]


def all_parts(output: Path, *, quick: bool, pretend: bool) -> list[Part]:
    """In the order in which they tell most: what is wrong first, what is slow next.

    Args:
        quick: the forms of the loss alone, two sizes of them, and one run of whole steps.
        pretend: everything is tiny and on the CPU; the tests skip themselves.
    """
    environment = {"CUDA_VISIBLE_DEVICES": "", "SIMREG_CPU": "1"} if pretend else {"SIMREG_CPU": ""}
    return [
        Part(MACHINE, (("benchmarks.gpu.machine", str(output / "machine.json")),), 3, (0,), environment),
        *_tests(output, environment, quick=quick),
        *_forms(output, environment, sizes="tiny" if pretend else "few" if quick else "all", pretend=pretend),
        *_steps(output, environment, quick=quick, pretend=pretend),
    ]


def _tests(output: Path, environment: dict[str, str], *, quick: bool) -> Iterator[Part]:
    """A file each, and the forms one by one: what breaks the device fails every later test of its process."""
    files = sorted(path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    files.sort(key=lambda name: name != "test_forms.py")
    for file in files:
        stem = file.removeprefix("test_").removesuffix(".py").replace("_", "-")
        for impl in MODULES if file == "test_forms.py" else ("",):
            name = "-".join(filter(None, ("tests", stem, impl)))
            words = ("pytest", f"tests/gpu/{file}", "-q", "-rfEs", "-p", "no:cacheprovider")
            chosen = ("-k", impl) if impl else ()
            report = (f"--junitxml={output / name}.xml", "-o", "junit_family=xunit2")
            minutes = 10 if impl else 30
            if impl or not quick:
                yield Part(name, ((*words, *chosen, *report),), minutes, (0, 1, 5), environment, f"{name}.xml")


def _forms(output: Path, environment: dict[str, str], *, sizes: str, pretend: bool) -> Iterator[Part]:
    device = "cpu" if pretend else "cuda"
    for impl in ON_CPU if pretend else FORMS:
        words = (impl, str(output / f"forms-{impl}.csv"), "--device", device, "--sizes", sizes)
        yield Part(f"forms-{impl}", (("benchmarks.gpu.forms", *words),), 10, (0,), environment)


def _steps(output: Path, environment: dict[str, str], *, quick: bool, pretend: bool) -> Iterator[Part]:
    """Alternating steps inside one run for every form, and whole runs in turns, which tell the memory, too."""
    model = "tiny" if pretend else "350m"
    batches = [_SMALL] if pretend else [f"--micro-batch-size {n} --global-batch-size {n}" for n in (8, 4, 2, 1)]

    def part(name: str, module: str, words: str, more: str = "") -> Part:
        common = ("--model", model, "--output", str(output / f"{name}.csv"), *shlex.split(words))
        commands = tuple((f"benchmarks.{module}", *common, "--flags", f"{batch}{more}") for batch in batches)
        return Part(name, commands, 12, (0,), environment)

    steps = 41 if pretend else 121 if quick else 221  # twenty for the start, windows of twenty, and one that ends them
    yield part("pairs", "step_pairs", f"--steps {steps} --kinds {'chunks' if quick or pretend else 'chunks,whole'}")
    if not quick:
        for impl in MODULES if not pretend else ():
            yield part(f"pairs-{impl}", "step_pairs", f"--steps {steps} --kinds chunks", f" --simreg-impl {impl}")
        yield part("steps", "steps", f"--rounds 1 --steps {21 if pretend else 60} --kinds chunks,AdaGC")
