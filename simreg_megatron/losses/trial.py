# SPDX-License-Identifier: Apache-2.0
"""Choose the implementation behind `impl="auto"` on a GPU: triton where it is right, else tiled.

A kernel that is right on one GPU, driver and release of Triton may not be on the next: so before the first step it is
compared with tiled in float32, on made-up rows of the run's own shape.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from simreg_megatron.kernels.contrast import Tokens, cut
from simreg_megatron.losses.simreg import AUTO, load_kernels


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
    """Let `auto` be triton if it is right on every rank, else tiled; return a line for the log that says why.

    A collective over the group. A rank without hidden states of its own (`computes` False) agrees with the others.
    """
    failure = failure_of("triton", shape, device) if computes else ""
    failed = torch.tensor(float(bool(failure)), device=device)
    if group is not None:
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
    AUTO[device.type, shape.dtype] = impl = "tiled" if failed else "triton"
    why = f"since triton {failure or 'fails on another rank'}" if failed else "which is right here"
    return f"impl auto is {impl} on {shape}, {why}"


def failure_of(impl: str, shape: Shape, device: torch.device) -> str:
    """Compare an implementation with tiled in float32, in terms and gradient; return its fault, or nothing."""
    try:
        whole = sample(shape, device)  # then part of a chunk with two documents, each third another rank's anchors
        few = [part[:, :1, :2048] for part in whole[:3]]
        shared = Tokens._make([*few, (torch.arange(few[1].shape[2], device=device) >= 25).expand_as(few[1]).long()])
        for tau in (max(shape.temperature, 0.01), 1.0):  # at 0.01 a few close pairs are all that counts
            rounding = error_of_sums(shape.dtype, shape.width, tau)
            bounds = 1e-5 + rounding, 3e-4 + rounding + torch.finfo(shape.dtype).eps / 2
            for tokens, num_ranks, where in ((whole, 1, ""), (shared, 3, " on chunks that ranks share")):
                first = Tokens._make(None if part is None else part[:2] for part in tokens)
                exact = _computed("tiled", first._replace(rows=first.rows.float()), tau, 1)
                computed = _computed(impl, tokens, tau, num_ranks)
                errors = [(got[:2] - right).norm() / right.norm() for got, right in zip(computed, exact, strict=True)]
                if not all(error <= bound for error, bound in zip(errors, bounds, strict=True)):  # nor if one is NaN
                    return "is wrong{} (terms off by {:.1e}, gradient by {:.1e})".format(where, *errors)
    except Exception as error:  # a kernel that does not compile, memory that is not there, ...
        return f"fails ({type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]})"
    return ""


def _computed(impl: str, tokens: Tokens, tau: float, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Compute SimReg's terms and the gradient of their sum, as ranks do that hold a span of each chunk."""
    kernels, length, grad = load_kernels(impl), tokens.rows.shape[2], torch.empty_like(tokens.rows)
    spans = cut((0, length), max(1, -(-length // num_ranks)))
    results = [kernels.forward(tokens, span, tau, save=True) for span in spans]
    coeffs = torch.cat([each.slopes for each in results], dim=-1)
    for span, each in zip(spans, results, strict=True):
        kernels.backward(tokens.rows, each.saved, coeffs, span, tau, grad[:, :, slice(*span)])
    return torch.cat([each.terms for each in results], dim=-1), grad


def error_of_sums(dtype: torch.dtype, width: int, temperature: float) -> float:
    """Bound the relative error that rounding in the sums behind the cosines adds, which the temperature divides."""
    # float32 rounds to either side; tensor cores cut products of half precision off towards zero (arXiv 2512.07004).
    return (width * 5 / 16 if dtype.itemsize == 2 else math.sqrt(width)) * 2.0**-24 / temperature


def sample(shape: Shape, device: torch.device) -> Tokens:
    """Make rows around one centre for each label, with labels by Zipf's law: losses as late in training."""
    generator = torch.Generator().manual_seed(1)
    chunk = shape.chunk_size if 0 < shape.chunk_size < shape.length else shape.length
    size, chances = (shape.batch, shape.length // chunk, chunk), 1 / torch.arange(1.0, 513)
    labels = torch.multinomial(chances, math.prod(size), replacement=True, generator=generator).view(size).to(device)
    usable = (torch.rand(size, generator=generator) < 0.9).to(device)
    centres = (torch.randn(512, shape.width, generator=generator) + 1.5).to(device, shape.dtype)
    noise = (0.6 * torch.randn(1024, shape.width, generator=generator)).to(device, shape.dtype)
    which = torch.randint(0, 1024, size, generator=generator).to(device)
    rows = centres[labels.permute(1, 2, 0)].add_(noise[which.permute(1, 2, 0)])  # [c, k, b, d], as Megatron has them
    return Tokens(rows.permute(2, 0, 1, 3), labels, usable, None)
