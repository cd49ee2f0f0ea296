# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.gpu.forms IMPL FILE.csv`: time, memory and error of one form of the loss; tiny without a GPU.

forward, both: a call without and with its backward, by the device's clock over calls that are queued without a wait, as
in a training step: where the host is slower than the device, this is the host's time. replay: both as a CUDA graph,
without the host. product: a library's product of all pairs. floor: 1.5 of them, as every pair is computed once, at the
rate of a large product, which is measured first. Each form has a process of its own: one that breaks the device takes
no other with it.
"""

from __future__ import annotations

import argparse
import statistics
import traceback
from collections.abc import Callable, Iterator
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import records
from benchmarks.cases import Size, hidden_states
from benchmarks.measure import _errors, in_turns, peak_bytes
from benchmarks.records import Record
from simreg_megatron.losses import simreg_loss
from simreg_megatron.losses.simreg import FAST_IMPLS

_CHUNKS = (Size(32, 1024, 1024), Size(16, 1024, 2048), Size(8, 1024, 3072), Size(4, 1024, 4096))  # micro-batches
_WHOLE = (Size(16, 2048, 1024), Size(2, 2048, 4096))  # of the presets from 350M to 7B
_LONG = (Size(1, 8192, 4096), Size(1, 32768, 1024), Size(1, 131072, 512))
SIZES = {"cuda": (*_CHUNKS, *_WHOLE, *_LONG), "cpu": (Size(2, 64, 32), Size(1, 100, 48))}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
_MOST_PAIRS = 1 << 26  # of which the error is taken: float64 is slow on many GPUs
_LARGE = 1 << 29  # pairs: fewer calls, neither a graph nor a product
_COLUMNS = (
    "forward_ms", "both_ms", "replay_ms", "product_ms", "extra_bytes", "loss_error", "gradient_error", "remark",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.forms", description=__doc__)
    parser.add_argument("impl", choices=("reference", *FAST_IMPLS))
    parser.add_argument("output", type=Path, metavar="FILE.csv")
    parser.add_argument("--from", dest="source", action="store_true", help="measure nothing: make the file's table")
    options = parser.parse_args()
    rows = None if options.source else measured(options.impl, "cuda" if torch.cuda.is_available() else "cpu")
    records.finish(options.output, rows, table)
    failed = [line["size"] for line in records.read(options.output) if line["remark"].startswith("failed")]
    if failed and options.impl != "reference":
        raise SystemExit(f"{options.impl} failed at {', '.join(failed)}")


def measured(impl: str, device: str) -> Iterator[dict[str, Any]]:
    """A line for each size; one that fails says why in its remark, and the next is measured."""
    side = 8192 if device == "cuda" else 256
    left, right = torch.randn(2, side, side, device=device).to(DTYPES[device])
    peak = 2 * side**3 / milliseconds(lambda: torch.mm(left, right), device, 20) / 1e9
    where = {"peak_tflops": float(f"{peak:.4g}"), **records.surroundings()}
    for size in SIZES[device]:
        line = {"form": impl, "size": str(size), "dtype": str(DTYPES[device]).removeprefix("torch.")}
        try:
            numbers = _line(impl, size, device)
        except Exception as error:  # a kernel on a GPU that it has never met may do anything
            traceback.print_exc()
            numbers = {"remark": f"failed: {type(error).__name__}: {error}"[:300]}
        print(line | numbers, flush=True)
        yield {**line, **dict.fromkeys(_COLUMNS), **numbers, **where}


def _line(impl: str, size: Size, device: str) -> dict[str, Any]:
    rows, labels = hidden_states(size.batch, size.length, size.width, DTYPES[device], device)
    pairs = size.batch * size.length**2
    sets = [(rows.requires_grad_(), labels), (rows.detach().flip(0, 1).requires_grad_(), labels.flip(0, 1))]
    inputs = cycle(sets)  # in turns: none is read from the cache

    def both(given: tuple[Tensor, Tensor] | None = None) -> None:
        part, ids = given or next(inputs)
        part.grad = None
        simreg_loss(part, ids, impl=impl).backward()

    both()  # libraries are loaded, and cuBLAS has taken its workspace out of torch's memory
    rows.grad = None
    numbers: dict[str, Any] = {"extra_bytes": peak_bytes(both, device)}
    calls = 5 if pairs > _LARGE else 20
    with torch.no_grad():
        if pairs <= _LARGE:
            numbers["product_ms"] = milliseconds(lambda: torch.matmul(part := next(inputs)[0], part.mT), device, calls)
        numbers["forward_ms"] = milliseconds(lambda: simreg_loss(*next(inputs), impl=impl), device, calls)
    numbers["both_ms"] = milliseconds(both, device, calls)
    if pairs <= _MOST_PAIRS:
        numbers["loss_error"], numbers["gradient_error"] = dict(_errors([impl], rows.detach(), labels))[impl]
    if device == "cuda" and pairs <= _LARGE:
        try:
            numbers["replay_ms"] = milliseconds(_graph(lambda: [both(each) for each in sets]).replay, device, calls) / 2
        except Exception as error:
            numbers["remark"] = f"no graph: {type(error).__name__}: {error}"[:300]
    return {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in numbers.items()}


def milliseconds(run: Callable[[], Any], device: str, calls: int) -> float:
    """Median of a call; on a GPU between events, with all calls queued one after another."""
    if device == "cpu":
        return 1e3 * in_turns({"run": run}, device)["run"]
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(one.elapsed_time(other) for one, other in pairwise(events))


def _graph(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def table(lines: list[Record]) -> Iterator[str]:
    where, peak = lines[0], float(lines[0]["peak_tflops"])
    yield f"{where['date']}, commit {where['commit']}, {where['machine']}, Python {where['python']}, torch"
    yield f"{where['torch']}; a large product: {peak:.0f} TFLOP/s. Chunks x tokens x width, bfloat16 if no other type"
    yield "is named; times in ms; MiB next to the inputs, with the gradient; errors relative to float64."
    yield ""
    yield "| size | form | floor | product | forward | both | replay | MiB | loss off | gradient off | |"
    yield "| --- " * 11 + "|"
    for line in lines:
        floor = 1.5 * 2 * Size(*map(int, line["size"].split(" x "))).all_pairs / (float(line["peak_tflops"]) * 1e9)
        times = (line[f"{name}_ms"] for name in ("product", "forward", "both", "replay"))
        numbers = [f"{float(number):.3g}" if number else "" for number in (floor, *times)]
        memory = f"{int(line['extra_bytes']) / 2**20:.0f}" if line["extra_bytes"] else ""
        off = [f"{float(line[name]):.0e}" if line[name] else "" for name in ("loss_error", "gradient_error")]
        size = line["size"] if line["dtype"] == "bfloat16" else f"{line['size']}, {line['dtype']}"
        yield f"| {' | '.join((size, line['form'], *numbers, memory, *off, line['remark'].replace('|', '/')))} |"


if __name__ == "__main__":
    main()
