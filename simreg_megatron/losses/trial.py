# SPDX-License-Identifier: Apache-2.0
"""Choose the form behind `impl="auto"` on a GPU: triton where it is right, else tiled.

A kernel that is right on one GPU, one driver and one release of Triton may not be on the next. So before the first step
triton computes made-up rows of the run's own shape, and is compared with tiled in float32. If it fails, is wrong or
does not fit into memory, tiled is taken, and the log says why. All ranks agree on one form, and no clock decides: every
start of a job takes the same one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from simreg_megatron.kernels.contrast import form_named
from simreg_megatron.kernels.form import Form, Tokens
from simreg_megatron.losses.simreg import AUTO

_FEW = 2048  # tokens of the chunk that two ranks share


class Shape(NamedTuple):
    """Size of a rank's hidden states: [length, batch, width], as Megatron has them."""

    batch: int
    length: int
    width: int
    chunk_size: int
    dtype: torch.dtype
    temperature: float = 0.01

    def __str__(self) -> str:
        chunks = f"chunks of {self.chunk_size}" if 0 < self.chunk_size < self.length else "whole sequences"
        return f"{self.batch} x {self.length} x {self.width} ({str(self.dtype).removeprefix('torch.')}, {chunks})"


def choose(shape: Shape, device: torch.device, group: dist.ProcessGroup | None = None, *, computes: bool = True) -> str:
    """Let `auto` be triton if it is right on every rank, else tiled, for rows of this type; return a line for the log.

    A collective over the group. A rank without hidden states of its own (`computes` False) agrees with the others.
    """
    failure = failure_of("triton", shape, device) if computes else ""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    failed = torch.tensor(float(bool(failure)), device=device)
    if group is not None:
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
    AUTO[device.type, shape.dtype] = impl = "tiled" if failed else "triton"
    why = f"since triton {failure or 'fails on another rank'}" if failed else "which is right here"
    return f"impl auto is {impl} on {shape}, {why}"


def failure_of(impl: str, shape: Shape, device: torch.device) -> str:
    """Compare a form with tiled in float32, in its terms and their gradient; return what is wrong with it, or nothing.

    All rows of the shape are computed, and the first two sequences compared; then one chunk with two documents, as
    two ranks compute it that share it, which takes other ways through the pairs.
    """
    try:
        whole = sample(shape, device)
        rows, labels, usable = (part[:, :1, :_FEW] for part in whole[:3])
        half = torch.arange(rows.shape[2], device=device) * 2 // rows.shape[2]
        chunk = Tokens(rows, labels, usable, half.expand_as(labels))
        for tau in (max(shape.temperature, 0.01), 1.0):  # at 0.01 a few close pairs are all that counts
            lost = error_of_sums(shape.dtype, shape.width, tau)
            bounds = 1e-5 + lost, 3e-4 + lost + torch.finfo(shape.dtype).eps / 2
            for how, tokens, compute in (("", whole, _on_one), (" on chunks that ranks share", chunk, _on_two)):
                found = compute(form_named(impl), tokens, tau)
                documents = None if tokens.documents is None else tokens.documents[:2]
                first = Tokens(tokens.rows[:2].float(), tokens.labels[:2], tokens.usable[:2], documents)
                exact = _on_one(form_named("tiled"), first, tau)
                errors = [(mine[:2] - right).norm() / right.norm() for mine, right in zip(found, exact, strict=True)]
                if not all(error <= bound for error, bound in zip(errors, bounds, strict=True)):  # nor if one is NaN
                    return "is wrong{} (terms off by {:.1e}, gradient by {:.1e})".format(how, *errors)
    except Exception as error:  # a kernel that does not compile, memory that is not there, ...
        return f"fails ({type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]})"
    return ""


def _on_one(form: Form, tokens: Tokens, tau: float) -> tuple[Tensor, Tensor]:
    """Compute SimReg's terms, and the gradient of their sum."""
    span, grad = (0, tokens.rows.shape[2]), torch.empty_like(tokens.rows)
    found = form.measure(tokens, span, tau, keep=True)
    form.pull_back(tokens.rows, found.kept, found.slopes, span, tau, grad)
    return found.terms, grad


def _on_two(form: Form, tokens: Tokens, tau: float) -> tuple[Tensor, Tensor]:
    """Compute the same as two ranks do that hold a span of each chunk, each pair on one of them for both."""
    length, grad = tokens.rows.shape[2], torch.empty_like(tokens.rows)
    first = max(1, length // 3)
    spans, middle = [(0, first), (first, length)], first // 2
    rectangles = [[((0, middle), spans[1])], [(spans[1], (middle, first))]]
    parts = [form.measure_part(tokens, *each, tau) for each in zip(spans, rectangles, strict=True)]
    sums = parts[0][1] + parts[1][1]
    pairs = zip(parts, spans, strict=True)
    found = [form.finish(kept, sums[..., slice(*span)], span, tau) for (kept, _), span in pairs]
    pull = torch.cat([each.slopes for each in found], dim=-1)
    for span, each in zip(spans, found, strict=True):
        form.pull_back(tokens.rows, each.kept, pull, span, tau, grad[:, :, slice(*span)])
    return torch.cat([each.terms for each in found], dim=-1), grad


def error_of_sums(dtype: torch.dtype, width: int, temperature: float) -> float:
    """Bound the relative error that rounding in the sums behind the cosines adds, which the temperature divides.

    float32 rounds each sum to either side. Tensor cores cut each product of half precision off towards zero, at up to
    5/16 units of 2^-24 (arXiv 2512.07004).
    """
    units = width * 5 / 16 if dtype.itemsize == 2 else math.sqrt(width)
    return units * 2.0**-24 / temperature


def sample(shape: Shape, device: torch.device) -> Tokens:
    """Make rows around one centre for each label, with labels by Zipf's law: losses as late in training."""
    generator = torch.Generator().manual_seed(1)
    chunk = shape.chunk_size if 0 < shape.chunk_size < shape.length else shape.length
    size, chances = (shape.length // chunk * chunk, shape.batch), 1 / torch.arange(1.0, 513)
    labels = torch.multinomial(chances, math.prod(size), replacement=True, generator=generator).view(size).to(device)
    usable = (torch.rand(size, generator=generator) < 0.9).to(device)
    centres = (torch.randn(512, shape.width, generator=generator) + 1.5).to(device, shape.dtype)
    noise = 0.6 * torch.randn(1024, shape.width, generator=generator)  # used again and again: made on the host
    which = torch.randint(0, 1024, size, generator=generator).to(device)
    rows = centres[labels].add_(noise.to(device, shape.dtype)[which])
    rows, labels, usable = (part.transpose(0, 1).unflatten(1, (-1, chunk)) for part in (rows, labels, usable))
    return Tokens(rows, labels, usable, None)
