# SPDX-License-Identifier: Apache-2.0
"""`make gpu`, or `python -m benchmarks.gpu [--calls a,b] [--seconds 1800]`: what SimReg does on this machine's GPU.

Call a asks whether it is right: the tests of tests/gpu, the launch scripts, saving and resuming, the demo, the forms of
the loss under compute-sanitizer. Call b asks how fast it is: the forms next to plain products, and steps with SimReg
next to plain Megatron's. Parts of call a run side by side. A part that fails or runs too long is listed, and the others
run; OUTPUT/report.md is written after every part. It needs no network.

Status 1 if a test or a part failed, 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import step_pairs
from benchmarks.gpu import report
from benchmarks.gpu.parts import CALLS, Setting
from benchmarks.gpu.run import Runner
from benchmarks.records import ROOT


def main(argv: Sequence[str] | None = None) -> int:
    """Run the calls; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "gpu", metavar="FOLDER")
    parser.add_argument("--calls", default=",".join(CALLS), metavar="WORDS", help=f"{', '.join(CALLS)} (default: all)")
    parser.add_argument("--seconds", type=float, default=1800.0, help="for each call; on an H200 450 to 600 do")
    parser.add_argument("--only", default="", metavar="WORDS", help="parts: 'tests*,forms-tiled,pairs-350m'")
    parser.add_argument("--pretend", action="store_true", help="try the plumbing on the CPU, with tiny sizes")
    step_pairs.add_text(parser)
    options = parser.parse_args(argv)
    calls, wanted = options.calls.split(","), (options.only or "*").split(",")
    if not set(calls) <= set(CALLS):
        parser.error(f"--calls takes {', '.join(CALLS)} or some of them, with commas; got {options.calls}")
    if not options.pretend and not torch.cuda.is_available():
        why = f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU"
        print(f"error: {why}: use --pretend to try all this on the CPU, in tiny sizes", file=sys.stderr)
        return 2
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    environment = {"CUDA_VISIBLE_DEVICES": "", "SIMREG_CPU": "1"} if options.pretend else {"SIMREG_CPU": ""}
    environment["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", "")))
    page = report.Report(output, pretend=options.pretend)
    with tempfile.TemporaryDirectory() as scratch:
        setting = Setting(output, Path(scratch), step_pairs.text(options), options.pretend)
        for call in calls:
            stages = ([part for part in stage if any(fnmatch.fnmatch(part.name, words) for words in wanted)]
                      for stage in setting.stages(call))  # fmt: skip
            Runner(output, options.seconds, environment).run(stages, page.add)
    return int(page.failed)


if __name__ == "__main__":
    raise SystemExit(main())
