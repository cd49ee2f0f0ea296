# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.bf16_weights`: what rounding to bfloat16 costs the gradient on a GPU, computed without one.

Relative errors of the gradient (Frobenius) of impl triton at tau 0.01, before it is rounded to the type of the rows
itself, which costs 1.7e-3: P and W are rounded, in float64 otherwise, on states as late in training and on heavy-tailed
ones.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import records
from benchmarks.cases import hidden_states
from benchmarks.records import Record

LENGTHS = (64, 128, 256, 511, 512, 1023, 1024, 2048, 4096)
WIDTHS = (256, 512, 1024, 2048, 4096, 8192)
LARGEST = 4096 * 4096  # numbers in the rows of one case


def errors(length: int, width: int) -> dict[str, Any]:
    rows, labels = hidden_states(1, length, width, torch.bfloat16, "cpu")
    return {
        "rows": "bfloat16", "tokens": length, "width": width, "triton": error_of_pairs(rows, labels),
        "triton, heavy tails": error_of_pairs(heavy_tailed(rows), labels),
    }  # fmt: skip


def heavy_tailed(rows: Tensor) -> Tensor:
    """States [1, n, d] with a few large features in each token, as residual streams have: noise of Student's t, 2."""
    generator = torch.Generator().manual_seed(1)
    normal, chi = (torch.randn(*rows.shape, count, generator=generator) for count in (1, 2))
    noise = normal.squeeze(-1) / chi.square().mean(-1).sqrt()
    return (rows.float() + 0.2 * noise.clamp(-50, 50)).to(rows.dtype)


def error_of_pairs(rows: Tensor, labels: Tensor) -> float:
    exact = gradient_by_pairs(rows, labels, lambda numbers: numbers)
    return float(
        (gradient_by_pairs(rows, labels, lambda numbers: numbers.bfloat16().double()) - exact).norm() / exact.norm()
    )


def gradient_by_pairs(
    rows: Tensor, labels: Tensor, rounding: Callable[[Tensor], Tensor], grad_term: float = 1.0
) -> Tensor:
    """The gradient in float64, as impl triton computes it, but for the rounding of P and of W.

    Args:
        rows: [b, n, d].
        labels: [b, n].
        grad_term: of each term.
    """
    rows = rows.double()
    scale = 1 / rows.norm(dim=-1, keepdim=True)
    cosines = (rows * scale) @ (rows * scale).mT
    exponentials = ((cosines - 1) / 0.01).exp().masked_fill_(torch.eye(rows.shape[1], dtype=torch.bool), 0.0)
    same = labels[:, :, None] == labels[:, None]
    total = 1 + (exponentials * same).sum(-1)
    ratio = (exponentials * ~same).sum(-1) / total
    a = grad_term / (1 + ratio) / (0.01 * total)
    b = a * ratio
    pairs = rounding(exponentials)
    found = torch.where(same, -(b[:, :, None] + b[:, None]), a[:, :, None] + a[:, None]) * pairs
    weights = rounding(found * scale * scale.mT)
    along = weights * (1 + 0.01 * pairs.clamp(min=1e-37).log()) / scale.mT
    return weights @ rows - along.sum(-1, keepdim=True) * scale * rows


def grid() -> Iterator[dict[str, Any]]:
    for width, length in itertools.product(WIDTHS, LENGTHS):
        if length * width <= LARGEST:
            print(f"{length} x {width}", file=sys.stderr, flush=True)
            yield {key: f"{part:.2e}" if isinstance(part, float) else part
                   for key, part in errors(length, width).items()}  # fmt: skip


def table(lines: list[Record]) -> Iterator[str]:
    """Print the errors; in brackets those on heavy-tailed states."""
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
    return "{:.1e} ({:.1e})".format(*(float(line[name]) for name in ("triton", "triton, heavy tails")))


def main() -> None:
    torch.set_num_threads(1)
    records.command("bf16_weights", __doc__, grid, table)


if __name__ == "__main__":
    main()
