# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.bf16_weights`: what rounding the gradient's weights to bfloat16 costs on a GPU.

The code for tensor cores on float64 rows that hold numbers of half precision (`benchmarks.emulation`): all that is
rounded is the weights, the exponentials that are kept for them, and float16 rows. Relative errors of the gradient
(Frobenius), before it is rounded to the type of the rows. tau 0.01, whole sequences, `cases.hidden_states`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks import records
from benchmarks.cases import hidden_states
from benchmarks.emulation import weights_as_on_a_gpu
from benchmarks.records import Record
from simreg_megatron.kernels import halves
from simreg_megatron.losses import simreg_loss

LENGTHS = (64, 128, 256, 511, 512, 1023, 1024, 2048, 4096)
WIDTHS = (256, 512, 1024, 2048, 4096, 8192)
LARGEST = 4096 * 4096  # numbers in the rows of one case


def errors(length: int, width: int, dtype: torch.dtype, by_document: bool = False) -> dict[str, Any]:
    """By one number a weight, by two, and by the one that the rule chooses."""
    rows, labels = hidden_states(1, length, width, dtype, "cpu")
    documents = torch.arange(length)[None] // 100 if by_document else None
    exact = _gradient(rows, labels, documents)
    found = {}
    for count in (1, 2):
        with weights_as_on_a_gpu(), mock.patch.object(halves, "numbers_per_weight", lambda *_, count=count: count):
            found[count] = float((_gradient(rows, labels, documents) - exact).norm() / exact.norm())
    chosen = halves.numbers_per_weight(length, width, by_document)
    return {
        "rows": str(dtype).removeprefix("torch."), "tokens": length, "width": width, "one number": found[1],
        "two numbers": found[2], "chosen": chosen, "error": found[chosen],
    }  # fmt: skip


def _gradient(rows: Tensor, labels: Tensor, documents: Tensor | None) -> Tensor:
    rows = rows.double().requires_grad_()
    loss = simreg_loss(rows, labels, documents=documents, impl="tiled")
    return torch.autograd.grad(loss * 2.0**24, rows)[0]


def grid() -> Iterator[dict[str, Any]]:
    for dtype, width, length in itertools.product((torch.bfloat16, torch.float16), WIDTHS, LENGTHS):
        if length * width <= LARGEST:
            print(f"{dtype}: {length} x {width}", file=sys.stderr, flush=True)
            yield {key: f"{part:.2e}" if isinstance(part, float) else part
                   for key, part in errors(length, width, dtype).items()}  # fmt: skip


def table(lines: list[Record]) -> Iterator[str]:
    """Of bfloat16 rows: the error as the rule chooses; in brackets that of one number where it takes two."""
    widths = sorted({int(line["width"]) for line in lines})
    found = {(line["tokens"], int(line["width"])): line for line in lines if line["rows"] == "bfloat16"}
    yield f"{records.described(lines)}. `python -m benchmarks.bf16_weights`"
    yield ""
    yield f"| tokens | {' | '.join(f'width {width}' for width in widths)} |"
    yield "| --- " * (len(widths) + 1) + "|"
    for tokens in dict.fromkeys(tokens for tokens, _ in found):
        cells = [_cell(found.get((tokens, width))) for width in widths]
        yield f"| {tokens} | {' | '.join(cells)} |"


def _cell(line: Record | None) -> str:
    if line is None:
        return ""
    chosen = f"{float(line['error']):.1e}"
    return chosen if line["chosen"] == "1" else f"{chosen} ({float(line['one number']):.1e})"


def main() -> None:
    torch.set_num_threads(1)
    records.command("bf16_weights", __doc__, grid, table, page="performance.md")


if __name__ == "__main__":
    main()
