# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks [--device cuda] [--output benchmarks/results/NAME.md]`: print the table of ratios.

Each case runs in a fresh process, one after the other; all rows of a size are of one run on one machine, so their
ratios can be compared, and seconds of two tables cannot.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import multiprocessing
import platform
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch
from rich.console import Console
from rich.markdown import Markdown

from benchmarks.cases import LOSSES
from benchmarks.measure import Case, Cost, cost

# Sequences, tokens, width. 16 GiB of memory, or a GPU of 80, hold the largest one densely.
SIZES = {
    "cpu": ((8, 64, 192), (8, 512, 512), (4, 1024, 1024), (1, 2048, 512), (1, 4096, 1024), (1, 8192, 512)),
    "cuda": ((8, 1024, 1024), (4, 2048, 2048), (1, 8192, 4096), (1, 32768, 4096), (1, 131072, 4096)),
}
_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--device", choices=SIZES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the table as Markdown, too")
    options = parser.parse_args()
    console = Console()
    lines = list(_header(options.device))
    for size in SIZES[options.device]:
        found = {}
        for name in LOSSES:
            if name == "SupConLoss" and importlib.util.find_spec("pytorch_metric_learning") is None:
                continue
            with console.status(f"{name}, {size}"):
                found[name] = _measured(Case(name, *size, _DTYPES[options.device], options.device))
        lines += _rows(" x ".join(map(str, size)), found)
    console.print(Markdown("\n".join(lines)))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _measured(case: Case) -> Cost | str:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(cost, case).result()
        except torch.OutOfMemoryError:
            return "out of memory"
        except BrokenProcessPool:
            return "killed"  # by the system, which had no more memory


def _header(device: str) -> Iterator[str]:
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"
    yield f"# SimReg, forward and backward: {where}"
    yield ""
    yield f"{datetime.date.today()}, `python -m benchmarks --device {device}`, {_DTYPES[device]}."
    yield f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}."
    yield ""
    yield "Sequences x tokens x width, each sequence one chunk. Ratios are to tiled: more is slower, or takes more."
    yield ""
    yield "| size | loss | ms | time / tiled | MiB | memory / tiled |"
    yield "| --- | --- | --- | --- | --- | --- |"


def _rows(size: str, found: dict[str, Cost | str]) -> Iterator[str]:
    base = found["tiled"]
    for name, measured in found.items():
        if isinstance(measured, str) or isinstance(base, str):
            yield f"| {size} | {name} | {measured} | | | |"
            continue
        time, memory = measured.seconds / base.seconds, measured.peak_bytes / max(base.peak_bytes, 1)
        yield (
            f"| {size} | {name} | {measured.seconds * 1e3:.1f} | {time:.2f} | {measured.peak_bytes / 2**20:.0f} | "
            f"{memory:.1f} |"
        )


if __name__ == "__main__":
    main()
