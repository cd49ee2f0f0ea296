# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks [--device cuda] [--output FOLDER]`: the cost of the loss, compared with other implementations.

Every size is measured in a process of its own, in which the losses take turns: ratios within a size are of one run on
one machine and can be compared; seconds of two sizes or two runs cannot. Writes DEVICE.csv and DEVICE.md.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import platform
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import track

from benchmarks import records
from benchmarks.cases import Size
from benchmarks.measure import Row, gemm_multiply_adds_per_second, measured
from tools import tables

SIZES = {
    "cpu": [
        Size(8, 64, 192),
        *(Size(max(1, 2048 // n), n, d) for d in (512, 1024) for n in (512, 1024, 2048, 4096, 8192, 16384)),
    ],
    "cuda": [Size(max(1, 8192 // n), n, d) for d in (512, 1024, 4096, 8192) for n in (2**k for k in range(9, 18))],
}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
GEMM_SIDE = {"cpu": 2048, "cuda": 8192}
INF_CL_OPERATIONS = 10
"""n^2 d floating-point operations in a step of Inf-CL (arXiv 2410.17243): 2 forward and 4 in each of its two backward
kernels, without the symmetry of SimReg's pairs. By formula: it cannot compute SimReg."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--device", choices=SIZES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--longest", type=int, metavar="N", help="leave out longer sequences")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write the rows and the table here")
    options = parser.parse_args()
    device, dtype = options.device, DTYPES[options.device]
    torch.set_num_threads(1)
    peak = gemm_multiply_adds_per_second(dtype, device, GEMM_SIDE[device])
    rows: list[Row] = []
    console = Console(width=max(130, Console().width))
    sizes = [size for size in SIZES[device] if size.length <= (options.longest or size.length)]
    for size in track(sizes, description="sizes", console=console, transient=True):
        rows += _in_own_process(size, dtype, device)
    text = "\n".join(_table(rows, device, peak)) + "\n"
    console.print(Markdown(text))
    if options.output:
        records.write(options.output / f"{device}.csv", _lines(rows, device, peak))
        options.output.joinpath(f"{device}.md").write_text(text, encoding="utf-8")


def _in_own_process(size: Size, dtype: torch.dtype, device: str) -> list[Row]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(measured, size, dtype, device).result()
        except torch.OutOfMemoryError:
            return [Row("all", size, True, remark="out of memory")]
        except BrokenProcessPool:
            return [Row("all", size, True, remark="killed")]  # by the system, which had no more memory


def _machine(device: str) -> str:
    where = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU, 1 thread"
    return f"{where}, {str(DTYPES[device]).removeprefix('torch.')}"


def _table(rows: Iterable[Row], device: str, peak: float) -> Iterator[str]:
    yield f"# SimReg, forward and backward: {_machine(device)}"
    yield ""
    yield f"{datetime.date.today()}, `python -m benchmarks --device {device}`. Python {platform.python_version()}, "
    yield f"torch {torch.__version__}. One square product reaches {2e-9 * peak:.0f} GFLOP/s here; the share is of that."
    if device == "cpu":
        yield tables.stamp("benchmarks")
    yield ""
    yield "Sequences x tokens x width, each sequence one chunk. Ratios are to tiled: more is slower, or takes more."
    yield "MiB are without the inputs, the gradient is among them. Errors are relative, to float64."
    yield ""
    yield "| size | loss | ms | / tiled | MiB | / tiled | error of loss | of gradient | GFLOP | share |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    whole = [row for row in rows if row.backward]
    tiled = {row.size: row for row in whole if row.loss == "tiled"}
    for row in whole:
        base = tiled.get(row.size)
        if row.seconds is None or base is None:
            yield f"| {row.size} | {row.loss} | {row.remark} | | | | | | | |"
            continue
        errors = [f"{error:.0e}" if error is not None else "" for error in (row.loss_error, row.gradient_error)]
        yield (
            f"| {row.size} | {row.loss} | {row.seconds * 1e3:.1f} | {row.seconds / base.seconds:.2f} | "
            f"{row.extra_bytes / 2**20:.0f} | {row.extra_bytes / base.extra_bytes:.1f} | {' | '.join(errors)} | "
            f"{2e-9 * row.multiply_adds:.1f} | {row.multiply_adds / row.seconds / peak:.2f} |"
        )
        if row.loss == "tiled":
            seconds = INF_CL_OPERATIONS / 2 * row.size.all_pairs / peak
            ratio = seconds / row.seconds
            yield f"| {row.size} | Inf-CL, by formula | {seconds * 1e3:.1f} | {ratio:.2f} | | | | | | 1 |"


def _lines(rows: Iterable[Row], device: str, peak: float) -> Iterator[dict[str, Any]]:
    for row in rows:
        yield {
            "date": datetime.date.today(), "machine": _machine(device), "python": platform.python_version(),
            "torch": torch.__version__, "gemm_gflops": round(2e-9 * peak, 1), "batch": row.size.batch,
            "tokens": row.size.length, "width": row.size.width, "loss": row.loss,
            "pass": "forward+backward" if row.backward else "forward", "seconds": row.seconds,
            "extra_bytes": row.extra_bytes, "loss_error": row.loss_error, "gradient_error": row.gradient_error,
            "multiply_adds": row.multiply_adds, "remark": row.remark,
        }  # fmt: skip


if __name__ == "__main__":
    main()
