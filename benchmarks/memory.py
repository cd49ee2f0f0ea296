# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.memory [--measure]`: bytes of the loss without its inputs and the gradient.

Counted for both devices by going through every tile with tensors that have no memory (`benchmarks.emulation`), forward
and backward; --measure adds what the CPU really took where that is a matter of minutes, as the check of the counting.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import records
from benchmarks.cases import hidden_states
from benchmarks.emulation import predicted_bytes
from benchmarks.measure import peak_bytes
from benchmarks.records import RESULTS, Record
from simreg_megatron.losses import simreg_loss

LENGTHS, WIDTHS, CHUNKS = (8192, 32768, 131072), (512, 4096), (1024, 0)
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
MOST_PAIRS = 1 << 30  # times width 512: what a CPU computes in a minute
DEFAULT = (2, 2048, 4096, 1024)  # the 7B preset: sequences, tokens, width, chunk


def cases(device: str) -> Iterator[tuple[int, int, int, int]]:
    yield DEFAULT
    for width, length, chunk in itertools.product(WIDTHS, LENGTHS, CHUNKS):
        # A CPU's small tiles are the same ones however long a whole sequence is, and there would be 33,000 of them.
        if device == "cuda" or length * (chunk or length) <= MOST_PAIRS:
            yield 1, length, width, chunk


def measured_bytes(batch: int, length: int, width: int, chunk: int) -> int | None:
    """On the CPU; None where it would take too long."""
    if batch * length * (chunk or length) * width > MOST_PAIRS * 512:
        return None
    rows, labels = hidden_states(batch, length, width, DTYPES["cpu"], "cpu")
    rows.requires_grad_()

    def run() -> None:
        torch.autograd.grad(simreg_loss(rows, labels, chunk_size=chunk, impl="tiled"), rows)

    return peak_bytes(run) - rows.nbytes


def rows_of(device: str, measures: bool) -> Iterator[dict[str, Any]]:
    for case in cases(device):
        batch, length, width, chunk = case
        print(f"{device}: {batch} x {length} x {width}, chunk {chunk or 'whole'}", file=sys.stderr, flush=True)
        counted = predicted_bytes(batch, length, width, chunk_size=chunk, dtype=DTYPES[device], device=device)
        found = measured_bytes(*case) if measures and device == "cpu" else None
        yield {
            "device": device, "rows": str(DTYPES[device]).removeprefix("torch."), "batch": batch, "tokens": length,
            "width": width, "chunk": chunk or "whole", "counted_mib": f"{counted / 2**20:.1f}",
            "measured_mib": "" if found is None else f"{found / 2**20:.1f}",
        }  # fmt: skip


def table(lines: list[Record]) -> Iterator[str]:
    yield f"{records.described(lines)}. `python -m benchmarks.memory --measure`"
    yield ""
    yield "| device | sequences | tokens | width | chunk | counted (MiB) | measured (MiB) |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for line in lines:
        names = ("device", "batch", "tokens", "width", "chunk", "counted_mib", "measured_mib")
        yield f"| {' | '.join(line[name] for name in names)} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--measure", action="store_true", help="run it on the CPU, too, where that is short")
    records.add_options(parser, RESULTS / "memory.csv")
    options = parser.parse_args()
    torch.set_num_threads(1)
    where = records.surroundings(threads=1)
    measured = ({**row, **where} for device in DTYPES for row in rows_of(device, options.measure))
    records.finish(options.source or options.output, None if options.source else measured, table)


if __name__ == "__main__":
    main()
