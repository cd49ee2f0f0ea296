# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.gpu.tiles FILE.csv`: what each kernel of impl triton takes on this GPU, with several tiles.

Times of one forward and backward of a micro-batch by the device's clock, from torch's profiler. The first line of a
kernel is the tile that the package uses; the others replace that one tile.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import records
from benchmarks.cases import Size, hidden_states
from benchmarks.records import Record
from simreg_megatron.kernels import triton as form
from simreg_megatron.losses import simreg_loss

SIZES = (Size(32, 1024, 1024), Size(4, 1024, 4096), Size(16, 1024, 2048), Size(8, 1024, 3072), Size(1, 8192, 4096))
_CALLS = 5


def _tiles(names: str, *choices: tuple[int, ...]) -> tuple[dict[str, int], ...]:
    return tuple(dict(zip(names.split(), choice, strict=True)) for choice in choices)


CHOICES = {
    "_pairs": _tiles(
        "SIDE BK PER_SM num_warps num_stages",
        (128, 64, 1, 8, 4), (128, 64, 1, 4, 4), (128, 32, 2, 4, 6), (128, 128, 1, 8, 2),
    ),
    "_product": _tiles(
        "BM BN BK PER_SM num_warps num_stages",
        (128, 256, 64, 1, 8, 4), (256, 128, 64, 1, 8, 3), (128, 128, 64, 2, 4, 3), (128, 128, 64, 1, 8, 4),
    ),
    "_weights": _tiles("ROWS COLUMNS num_warps", (8, 256, 4), (4, 512, 4), (16, 128, 4)),
    "_ids_and_norms": _tiles("TOKENS FEATURES num_warps", (4, 512, 2), (8, 512, 4), (16, 256, 4)),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.tiles", description=__doc__)
    parser.add_argument("output", type=Path, metavar="FILE.csv")
    parser.add_argument("--seconds", type=float, default=600, help="measure nothing new after these")
    parser.add_argument("--from", dest="source", action="store_true", help="measure nothing: make the file's table")
    options = parser.parse_args()
    records.finish(options.output, None if options.source else measured(options.seconds), table)


def measured(seconds: float) -> Iterator[dict[str, Any]]:
    end, where = time.monotonic() + seconds, records.surroundings()
    for size in SIZES:
        rows, labels = hidden_states(size.batch, size.length, size.width, torch.bfloat16, "cuda")
        rows.requires_grad_()

        def both(rows: torch.Tensor = rows, labels: torch.Tensor = labels) -> None:
            rows.grad = None
            simreg_loss(rows, labels, impl="triton").backward()

        for kernel, ms in by_kernel(both).items():
            yield {"size": str(size), "kernel": kernel, "tile": "", "ms": ms, "remark": "", **where}
        for kernel, choices in CHOICES.items():
            for tile in choices:
                if time.monotonic() > end:
                    return
                words = " ".join(f"{name}={value}" for name, value in tile.items())
                line = {"size": str(size), "kernel": kernel, "tile": words, "ms": "", "remark": ""}
                try:
                    line["ms"] = with_tile(kernel, tile, lambda: by_kernel(both))[kernel]
                except Exception as error:  # too much shared memory, for one
                    line["remark"] = f"{type(error).__name__}: {error}"[:200]
                print(line, flush=True)
                yield {**line, **where}


def with_tile(kernel: str, tile: dict[str, int], run: Callable[[], Any]) -> Any:
    """Call `run` while the kernel computes such tiles."""
    kind = form._kind(torch.empty(1, 1, 1, 16, dtype=torch.bfloat16, device="cuda"))
    tiles = {"_pairs": form.PAIRS[kind], "_product": form.PRODUCT[kind], "_weights": form.WEIGHTS}
    with mock.patch.dict(tiles.get(kernel, form.NORMS), tile):
        return run()


def by_kernel(run: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of a call of each of the form's kernels, and of all others together."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(_CALLS):
            run()
        torch.cuda.synchronize()
    times = {"others": 0.0}
    for event in seen.key_averages():
        name = event.key if hasattr(form, event.key) else "others"
        times[name] = times.get(name, 0.0) + event.self_device_time_total / _CALLS / 1e3
    return {name: float(f"{ms:.4g}") for name, ms in times.items()}


def table(lines: list[Record]) -> Iterator[str]:
    where = lines[0]
    yield f"{where['date']}, commit {where['commit']}, {where['machine']}, torch {where['torch']}."
    yield "bfloat16 rows, chunks x tokens x width; ms of one forward and backward; no tile: the package's own."
    yield ""
    sizes = list(dict.fromkeys(line["size"] for line in lines))
    yield f"| kernel | tile | {' | '.join(sizes)} |"
    yield "| --- | --- |" + " --- |" * len(sizes)
    times = {(line["kernel"], line["tile"], line["size"]): line["ms"] or "fails" for line in lines}
    in_order = sorted(lines, key=lambda line: line["kernel"])
    for kernel, tile in dict.fromkeys((line["kernel"], line["tile"]) for line in in_order):
        yield f"| {kernel} | {tile} | {' | '.join(times.get((kernel, tile, size), '') for size in sizes)} |"


if __name__ == "__main__":
    main()
