# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.gpu.forms IMPL FILE.csv [--device cuda] [--sizes all]`: one form of the loss, one product.

The yardstick is a plain product of all pairs of the same rows, both halves of the square, by the library: whoever wrote
SimReg out would pay one for the forward and three with the backward. The form and the product take turns. Each form has
a process of its own, so that one which breaks the device takes no other with it.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import records
from benchmarks.cases import Size, exact, hidden_states
from benchmarks.measure import in_turns, peak_bytes
from simreg_megatron.kernels.contrast import MODULES
from simreg_megatron.losses import simreg_loss

_CHUNKS = (Size(32, 1024, 1024), Size(16, 1024, 2048), Size(8, 1024, 3072), Size(4, 1024, 4096))  # micro-batches
_WHOLE = (Size(16, 2048, 1024), Size(2, 2048, 4096))  # of the presets from 350M to 7B
_LONG = (Size(1, 8192, 4096), Size(1, 32768, 1024), Size(1, 131072, 512))
SIZES = {
    "all": (*_CHUNKS, *_WHOLE, *_LONG),
    "few": (_CHUNKS[0], _CHUNKS[-1]),
    "tiny": (Size(2, 64, 32), Size(1, 100, 48)),
}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
PRODUCTS = {"forward": 1, "forward+backward": 3}
_PANEL = 1 << 30  # bytes of the product that are written at a time
_MOST_PAIRS = 1 << 26  # of which the error is taken: float64 is slow on many GPUs


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.forms", description=__doc__)
    parser.add_argument("impl", choices=("reference", *MODULES))
    parser.add_argument("output", type=Path)
    parser.add_argument("--device", choices=DTYPES, default="cuda")
    parser.add_argument("--sizes", choices=SIZES, default="all")
    options = parser.parse_args()
    records.write(options.output, measured(options.impl, SIZES[options.sizes], options.device))
    failed = [line["size"] for line in records.read(options.output) if line["remark"].startswith("failed")]
    if failed and options.impl != "reference":
        raise SystemExit(f"{options.impl} failed at {', '.join(dict.fromkeys(failed))}")


def measured(impl: str, sizes: tuple[Size, ...], device: str) -> Iterator[dict[str, Any]]:
    """A line for each size and pass; one that fails says why in its remark, and the next is measured."""
    where = records.surroundings()
    for size in sizes:
        for way in PRODUCTS:
            line = {"form": impl, "size": str(size), "pass": way}
            try:
                found = _line(impl, size, way, device)
            except Exception as error:  # whatever a kernel does on a GPU that it has never met
                traceback.print_exc()
                found = {**dict.fromkeys(_COLUMNS), "remark": f"failed: {type(error).__name__}: {error}"[:300]}
            print(line | found, flush=True)
            yield {**line, **found, **where}


_COLUMNS = ("seconds", "product_seconds", "extra_bytes", "loss_error", "gradient_error", "remark")


def _line(impl: str, size: Size, way: str, device: str) -> dict[str, Any]:
    rows, labels = hidden_states(size.batch, size.length, size.width, DTYPES[device], device)
    backward = way != "forward"
    loss = partial(simreg_loss, impl=impl)
    runs: dict[str, Callable[[], Any]] = {
        "form": lambda: _run(loss, rows, labels, backward),
        "product": lambda: full_product(rows),
    }
    for run in runs.values():
        run()  # libraries are loaded, and cuBLAS has taken its workspace out of torch's memory
    extra = peak_bytes(runs["form"], device)
    runs["product"]()
    seconds = in_turns(runs, device)
    errors = _errors(loss, rows, labels) if backward and size.batch * size.length**2 <= _MOST_PAIRS else (None, None)
    return dict(zip(_COLUMNS, (seconds["form"], seconds["product"], extra, *errors, ""), strict=True))


def _run(loss: Callable[[Tensor, Tensor], Tensor], rows: Tensor, labels: Tensor, backward: bool) -> None:
    with torch.set_grad_enabled(backward):
        value = loss(rows.detach().requires_grad_(backward), labels)
        if backward:
            value.backward()


def full_product(rows_BND: Tensor) -> None:
    """rows rows^T of every sequence, panel by panel, as a matrix of all pairs may not fit."""
    batch, length, _ = rows_BND.shape
    height = max(1, _PANEL // (batch * length * rows_BND.element_size()))
    for first in range(0, length, height):
        torch.matmul(rows_BND[:, first : first + height], rows_BND.mT)


def _errors(loss: Callable[[Tensor, Tensor], Tensor], rows: Tensor, labels: Tensor) -> tuple[float, float]:
    """Relative to float64, of the loss and (Frobenius) of the gradient; scaled up, so that no gradient underflows."""
    found = []
    for way, given in ((loss, rows), (exact, rows.double())):
        leaf = given.detach().requires_grad_()
        value = way(leaf, labels)
        (value * 2.0**24).backward()
        found.append((value.detach().double(), leaf.grad.double()))
    return tuple(((ours - true).norm() / true.norm()).item() for ours, true in zip(*found, strict=True))


if __name__ == "__main__":
    main()
