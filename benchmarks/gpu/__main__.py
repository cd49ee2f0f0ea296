# SPDX-License-Identifier: Apache-2.0
"""`make gpu`, or `python -m benchmarks.gpu [--output runs/gpu] [--quick]`: what this machine's GPUs make of SimReg.

Runs the tests of tests/gpu, the forms of the loss beside plain products, and steps of the 350M model with SimReg beside
plain Megatron's, each part under a time limit, and writes OUTPUT/report.md with the rows beside it. A part that fails
is told there, and the others run. Called again, it runs what did not end; --again runs all.

Status 1 where a test or a part failed, 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.gpu import report, run
from benchmarks.gpu.parts import MACHINE, Part, all_parts
from benchmarks.gpu.run import Outcome
from benchmarks.records import ROOT

NO_GPU = (
    "error: torch {torch} (CUDA {cuda}) sees no GPU: look whether `nvidia-smi` lists one, whether CUDA_VISIBLE_DEVICES "
    "or the container hides it, and whether this torch is a CUDA build that fits the driver; --pretend tries all this "
    "on the CPU, in tiny sizes"
)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    options = _options(argv)
    if not options.pretend and not torch.cuda.is_available():
        built_for = torch.version.cuda or "none: it is built for the CPU"
        print(NO_GPU.format(torch=torch.__version__, cuda=built_for), file=sys.stderr)
        return 2
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    parts = all_parts(output, quick=options.quick, pretend=options.pretend)
    wanted = [word for word in options.only.split(",") if word]
    parts = [part for part in parts if not wanted or part.name == MACHINE or part.name.startswith(tuple(wanted))]
    outcomes: list[Outcome] = []
    stopped = False
    try:
        for number, part in enumerate(parts, 1):
            outcomes.append(_run(part, f"{number} of {len(parts)}", output, again=options.again))
    except KeyboardInterrupt:
        stopped = True
    page = output / "report.md"
    page.write_text(report.text(output, outcomes, pretend=options.pretend), encoding="utf-8")
    print(f"{'stopped; ' if stopped else ''}the report: {page}")
    return 130 if stopped else int(report.has_failed(output, outcomes))


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "gpu", metavar="FOLDER")
    parser.add_argument("--quick", action="store_true", help="the forms alone, two sizes, one run of whole steps")
    parser.add_argument("--only", default="", metavar="WORDS", help="parts that begin so: tests,forms-tiled,pairs")
    parser.add_argument("--again", action="store_true", help="parts that ended, too")
    parser.add_argument("--pretend", action="store_true", help="try the plumbing on the CPU, with tiny sizes")
    return parser.parse_args(argv)


def _run(part: Part, place: str, output: Path, *, again: bool) -> Outcome:
    of = _what_it_tells_of(part, output)
    console = Console(highlight=False, soft_wrap=True)
    found = None if again or part.name == MACHINE else run.kept(part, output, of)
    if found is None:
        console.print(f"{place}: {part.name} (at most {part.minutes} minutes; {output / part.name}.log)")
        found = run.run(part, output, of)
        console.print(f"  {found.state}, {found.seconds:.0f} s")
    else:
        console.print(f"{place}: {part.name}: ended in an earlier call, --again runs it once more")
    return found


def _what_it_tells_of(part: Part, output: Path) -> str:
    """Commands, code and GPUs: a result of others is not this part's."""
    gpus = "" if part.name == MACHINE else report.facts(output).get("GPUs", "")
    return hashlib.sha256(repr((part.commands, _code(), gpus)).encode()).hexdigest()[:16]


def _code() -> str:
    """The commit, and what was changed since; empty without git."""
    commands = (["git", "rev-parse", "HEAD"], ["git", "diff", "HEAD"])
    try:
        return "".join(subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout for command in commands)
    except OSError:
        return ""


if __name__ == "__main__":
    raise SystemExit(main())
