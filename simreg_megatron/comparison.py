# SPDX-License-Identifier: Apache-2.0
"""Compare a form of SimReg, on the device where it will run, with a slower one: loss and gradient of made-up rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from simreg_megatron.kernels.form import Tokens, form_named
from simreg_megatron.losses.simreg import simreg_loss

LOSS_ERROR, GRADIENT_ERROR = 1e-5, 3e-4
_FEW = 2048  # tokens
_REFERENCE = "reference", torch.float64, _FEW
_COLDEST = 0.01  # at lower temperatures float32 has no number as small as the loss of the sample

Found = tuple[Tensor, Tensor]  # loss and gradient
Pair = tuple[float, float]  # of the same


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


def errors(shape: Shape, impl: str, device: torch.device) -> Iterator[tuple[str, Pair, Pair]]:
    """Compare loss and gradient: how, by how much they differ, relative, and by how much they may.

    A form is compared with the form tiled in float32, and that one with the reference in float64 on few tokens. Also
    compared is one chunk as two ranks compute it that share it, which takes other ways through the pairs.
    """
    yardstick, dtype, most = ("tiled", torch.float32, shape.length) if impl != "tiled" else _REFERENCE
    chunk = shape.chunk_size if 0 < shape.chunk_size < shape.length else shape.length
    for tau in (max(shape.temperature, _COLDEST), 1.0):  # at 0.01 a few close pairs are all that counts
        lost = error_of_sums(shape.dtype, shape.width, tau)
        may = LOSS_ERROR + lost, GRADIENT_ERROR + lost + torch.finfo(shape.dtype).eps / 2
        alone = shape._replace(batch=min(shape.batch, 2), length=min(shape.length, most), temperature=tau)
        for size, is_shared in ((alone, False), (alone._replace(length=min(chunk, _FEW), chunk_size=0), True)):
            given = sample(size, device)
            loss, grad = value_and_gradient(given[0].to(dtype), *given[1:], size, yardstick)
            factor = 2.0 ** -math.frexp(grad.abs().max().item())[1]  # a loss scale: float16 has no number of 1e-10
            compute = _as_two_ranks if is_shared else _as_one_rank
            for value, gradient in compute(*given, size, impl, factor):
                found = _apart(value, loss), _apart(gradient, grad * factor)
                yield " as two ranks compute it" if is_shared else "", found, may


def error_of_sums(dtype: torch.dtype, width: int, temperature: float) -> float:
    """Bound the relative error that rounding in the sums behind the cosines adds, which the temperature divides.

    float32 rounds each sum to either side. Tensor cores cut each product of half precision off towards zero, at up to
    5/16 units of 2^-24 (arXiv 2512.07004).
    """
    units = width * 5 / 16 if dtype.itemsize == 2 else math.sqrt(width)
    return units * 2.0**-24 / temperature


def sample(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Make rows [length, batch, width], labels and a mask [batch, length], the same on every rank and device.

    Labels by Zipf's law, rows around one centre a label: losses as late in training.
    """
    generator = torch.Generator().manual_seed(1)
    size, chances = (shape.batch, shape.length), 1 / torch.arange(1.0, 513)
    labels = torch.multinomial(chances, math.prod(size), replacement=True, generator=generator).view(size).to(device)
    valid = (torch.rand(size, generator=generator) < 0.9).to(device)
    centres = (torch.randn(512, shape.width, generator=generator) + 1.5).to(device)
    noise = torch.randn(1024, shape.width, generator=generator).to(device)  # used again and again: made on the host
    which = torch.randint(0, 1024, size, generator=generator).to(device)
    rows = torch.empty(shape.length, shape.batch, shape.width, dtype=shape.dtype, device=device)
    for number in range(shape.batch):
        rows[:, number] = (centres[labels[number]] + 0.6 * noise[which[number]]).to(shape.dtype)
    return rows, labels, valid


def value_and_gradient(
    rows: Tensor, labels: Tensor, valid: Tensor, shape: Shape, impl: str, factor: float = 1.0
) -> Found:
    """Compute the loss, and the gradient of `factor` times the loss."""
    leaf = rows.detach().requires_grad_()
    options = {"valid": valid, "chunk_size": shape.chunk_size, "temperature": shape.temperature}
    loss = simreg_loss(leaf.transpose(0, 1), labels, impl=impl, **options)  # type: ignore[arg-type]
    return loss.detach(), torch.autograd.grad(loss * factor, leaf)[0]


def _as_one_rank(*given: Any) -> Iterator[Found]:
    yield value_and_gradient(*given)


def _as_two_ranks(
    rows: Tensor, labels: Tensor, valid: Tensor, shape: Shape, impl: str, factor: float
) -> Iterator[Found]:
    """Compute one chunk in each sequence as two ranks do that hold a part each (see `sharded.ratios`).

    First each pair on one of the two, for both; then all pairs of its anchors on each, kept for its backward.
    """
    form, tau, count = form_named(impl), shape.temperature, valid.sum()
    tokens = Tokens(rows.transpose(0, 1).unsqueeze(1), labels.unsqueeze(1), valid.unsqueeze(1), None)
    first = max(1, shape.length // 3)
    parts, middle = ((0, first), (first, shape.length)), first // 2
    between = [((0, middle), parts[1])], [(parts[1], (middle, first))]
    measured = [form.measure_part(tokens, part, shared, tau) for part, shared in zip(parts, between, strict=True)]
    sums = measured[0][1] + measured[1][1]
    shared = [form.finish(kept, sums[..., slice(*part)], part) for (kept, _), part in zip(measured, parts, strict=True)]
    for kept in (shared, [form.measure(tokens, part, tau, keep=True) for part in parts]):
        ratio = torch.cat([each.ratio for each in kept], dim=-1)
        pulls = [form.anchor_pull(factor / count / (1 + each.ratio), each, tau) for each in kept]
        pull, grad = torch.cat(pulls, dim=-1), torch.empty_like(rows)
        for part, each in zip(parts, kept, strict=True):
            into = grad.transpose(0, 1).unsqueeze(1)[:, :, slice(*part)]
            form.pull_back(tokens.rows, each, pull, part, tau, into)
        yield ratio.log1p().sum() / count, grad


def _apart(one: Tensor, other: Tensor) -> float:
    return (torch.linalg.vector_norm(one - other) / torch.linalg.vector_norm(other)).item()
