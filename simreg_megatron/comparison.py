# SPDX-License-Identifier: Apache-2.0
"""Is a form of SimReg right where it runs? Its loss and gradient on made-up rows, beside those of a slower form.

* Some two thousand tokens, some masked, differ from the reference in float64 by at most LOSS_ERROR and GRADIENT_ERROR,
  beside the error of sums (and half a unit of the rows' own type).
* The same holds where two ranks share a chunk, which takes other ways through the pairs.
* Longer chunks are compared with the tiles in float32, which were compared with the reference before.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from simreg_megatron.kernels.form import Tokens, form_named
from simreg_megatron.kernels.precision import row_by_row, row_norms
from simreg_megatron.losses.simreg import simreg_loss

LOSS_ERROR, GRADIENT_ERROR = 1e-5, 3e-4
_LOST_PER_PRODUCT = {torch.float16: 5 / 16, torch.bfloat16: 5 / 32}
"""Units of 2^-24 that each product of half precision may cost: (1 / 2^p + 1 / n) / 2, where n are summed at once and p
bits beyond float32's are kept of each: 8 and 1 by an A100; 16 and 2 by an H100, which loses half as much. Products of
bfloat16 have 16 bits and seldom reach so far down."""
_COMPARED = 2048  # tokens, at most, that the reference computes in float64
_COLDEST = 0.01  # at lower temperatures float32 has no number as small as the loss of the sample


class Shape(NamedTuple):
    """What a rank computes on: [length, batch, width] as Megatron has its hidden states."""

    batch: int
    length: int
    width: int
    chunk_size: int
    dtype: torch.dtype
    temperature: float = 0.01

    def __str__(self) -> str:
        chunks = f"chunks of {self.chunk_size}" if 0 < self.chunk_size < self.length else "whole sequences"
        return f"{self.batch} x {self.length} x {self.width} ({str(self.dtype).removeprefix('torch.')}, {chunks})"


OF_THE_PAPER = {
    "LLaMA 350M": Shape(16, 2048, 1024, 1024, torch.bfloat16),
    "LLaMA 7B": Shape(2, 2048, 4096, 1024, torch.bfloat16),
}


class Comparison(NamedTuple):
    """A form on rows of this shape, held against the yardstick, a form as well."""

    shape: Shape
    yardstick: str = "reference"
    by: str = ""  # "two ranks" that share each chunk, "two ranks that keep" their pairs; else one

    def errors(self, impl: str, device: torch.device) -> tuple[float, float]:
        """Of the loss and of the gradient, relative."""
        rows, labels, valid = sample(self.shape, device)
        exact = rows.double() if self.yardstick == "reference" else rows.float()
        expected_loss, expected_grad = value_and_gradient(exact, labels, valid, self.shape, self.yardstick)
        factor = _to_unit_size(expected_grad)
        if self.by:
            keep = self.by.endswith("keep")
            loss, grad = _as_two_ranks(rows, labels, valid, self.shape, impl, factor, keep=keep)
        else:
            loss, grad = value_and_gradient(rows, labels, valid, self.shape, impl, factor)
        del exact
        return _apart(loss, expected_loss), _apart(grad, expected_grad * factor)

    def allowed(self) -> tuple[float, float]:
        """What a right form's errors may be."""
        lost = error_of_sums(self.shape.dtype, self.shape.width, self.shape.temperature)
        return LOSS_ERROR + lost, GRADIENT_ERROR + lost + torch.finfo(self.shape.dtype).eps / 2


def comparisons(shape: Shape, impl: str) -> list[Comparison]:
    """Few tokens against the reference, also where every pair weighs; a longer chunk against the tiles, too."""
    chunk = shape.chunk_size if 0 < shape.chunk_size < shape.length else shape.length
    temperature = max(shape.temperature, _COLDEST)
    # At tau 0.01 a few close pairs are all there is: a tile of others could be missing unseen.
    found = []
    for tau in (temperature, 1.0):
        size = shape._replace(batch=min(shape.batch, 2), length=min(shape.length, _COMPARED), temperature=tau)
        shared = size._replace(length=min(chunk, _COMPARED), chunk_size=0)
        found += [Comparison(size), Comparison(shared, by="two ranks"), Comparison(shared, by="two ranks that keep")]
        if chunk > _COMPARED and impl != "tiled":
            found.append(Comparison(size._replace(batch=1, length=shape.length), "tiled"))
    return found


def error_of_sums(dtype: torch.dtype, width: int, temperature: float) -> float:
    """What the sums behind the cosines may add to a relative error, which the temperature divides.

    float32 rounds after each number, to either side. Tensor cores align some products of half precision and the sum so
    far with the largest of them, and cut each of these off a bit or two below float32's last place, and their sum at
    it: always towards zero.

    Sources: Fasi, Higham, Mikaitis and Pranesh 2021, Numerical behavior of NVIDIA tensor cores; arXiv 2512.07004.
    """
    units = width * _LOST_PER_PRODUCT[dtype] if dtype in _LOST_PER_PRODUCT else math.sqrt(width)
    return units * 2.0**-24 / temperature


def sample(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [length, batch, width], labels and a mask [batch, length], the same on every rank and device.

    Labels by Zipf's law, rows around one centre a label: losses as late in training.
    """
    generator = torch.Generator().manual_seed(1)
    num_labels = 512
    chances = 1 / torch.arange(1.0, num_labels + 1)
    size = shape.batch, shape.length
    labels = torch.multinomial(chances, math.prod(size), replacement=True, generator=generator).view(size).to(device)
    valid = (torch.rand(size, generator=generator) < 0.9).to(device)
    centres = (torch.randn(num_labels, shape.width, generator=generator) + 1.5).to(device)
    noise = torch.randn(1024, shape.width, generator=generator).to(device)  # used again and again: made on the host
    which = torch.randint(0, 1024, size, generator=generator).to(device)
    rows = torch.empty(shape.length, shape.batch, shape.width, dtype=shape.dtype, device=device)
    for number in range(shape.batch):
        rows[:, number] = (centres[labels[number]] + 0.6 * noise[which[number]]).to(shape.dtype)
    return rows, labels, valid


def value_and_gradient(
    rows: Tensor, labels: Tensor, valid: Tensor, shape: Shape, impl: str, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The gradient is that of `factor` times the value."""
    leaf = rows.detach().requires_grad_()
    loss = simreg_loss(
        leaf.transpose(0, 1), labels, valid=valid, chunk_size=shape.chunk_size, temperature=shape.temperature, impl=impl
    )
    (loss * factor).backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def _as_two_ranks(
    rows: Tensor, labels: Tensor, valid: Tensor, shape: Shape, impl: str, factor: float, *, keep: bool
) -> tuple[Tensor, Tensor]:
    """The same of one chunk in each sequence, as two ranks do it that hold a part each (see `sharded.ratios`).

    Args:
        keep: each rank computes all pairs of its anchors and keeps them for its backward, where they are few enough;
            else every pair is computed on one of the two, for both.
    """
    form = form_named(impl)
    tokens = Tokens(rows.transpose(0, 1).unsqueeze(1), labels.unsqueeze(1), valid.unsqueeze(1), None)
    first = max(1, shape.length // 3)
    parts = (0, first), (first, shape.length)
    middle = first // 2
    if keep:
        kept = [form.measure(tokens, part, shape.temperature, keep=True) for part in parts]
    else:
        between = [((0, middle), parts[1])], [(parts[1], (middle, first))]
        measured = [
            form.measure_part(tokens, part, shared, shape.temperature)
            for part, shared in zip(parts, between, strict=True)
        ]
        sums = measured[0][1] + measured[1][1]
        kept = [
            form.finish(given, sums[..., slice(*part)], part) for (given, _), part in zip(measured, parts, strict=True)
        ]
    count = valid.sum()
    loss = (kept[0].ratio.log1p().sum() + kept[1].ratio.log1p().sum()) / count
    pulls = [form.anchor_pull(factor / count / (1 + each.ratio), each, shape.temperature) for each in kept]
    pull, grad = torch.cat(pulls, dim=-1), torch.empty_like(rows)
    for part, each in zip(parts, kept, strict=True):
        into = grad.transpose(0, 1).unsqueeze(1)[:, :, slice(*part)]
        form.pull_back(tokens.rows, each, pull, part, shape.temperature, into)
    return loss, grad


def _to_unit_size(grad: Tensor) -> float:
    """A factor that brings its largest number near 1, as a loss scale would: float16 has none of 1e-10."""
    _, exponent = math.frexp(grad.abs().max().item())
    return 2.0**-exponent


def _apart(one: Tensor, other: Tensor) -> float:
    """A part at a time: gradients of long sequences take gigabytes as they are."""
    norms = row_by_row(lambda *rows: (row_norms(rows[0] - rows[1]), row_norms(rows[1])), *torch.atleast_1d(one, other))
    difference, size = (torch.linalg.vector_norm(part) for part in norms)
    return (difference / size).item()
