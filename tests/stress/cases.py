# SPDX-License-Identifier: Apache-2.0
"""Random inputs as hard as they come: temperatures, lengths, labels, types and masks.

Shapes: b sequences, n tokens, D features.
"""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor

TAU = (1e-3, 1.0)
LABELS = ("one", "all different", "few", "zipf")
SPREADS = ("random", "near", "opposite")
"""Of directions: any; cosines of 1 - 1e-7; both signs of the same few."""
EXPONENT = {torch.float32: 20, torch.bfloat16: 20, torch.float16: 3}
"""Norms go from 10^-e to 10^e; in float16 nothing else is finite, or not zero."""


class Case(NamedTuple):
    rows: Tensor  # [b, n, D]
    labels: Tensor  # [b, n]
    valid: Tensor  # bool [b, n]
    tau: float
    kind: str


def draw(generator: Generator, batch: int, length: int, width: int) -> Case:
    def pick(choices: tuple) -> object:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    dtype, label, spread = pick(tuple(EXPONENT)), pick(LABELS), pick(SPREADS)
    low, high = map(math.log, TAU)
    tau = math.exp(low + (high - low) * float(torch.rand((), generator=generator)))
    rows = _directions(generator, str(spread), batch, length, width)
    span = EXPONENT[dtype]
    norms = 10.0 ** (span * (2 * torch.rand(batch, length, 1, generator=generator) - 1) * float(pick((0.0, 1.0))))
    valid = torch.rand(batch, length, generator=generator) < float(pick((1.0, 0.7)))
    labels = _labels(generator, str(label), batch, length)
    return Case((rows * norms).to(dtype), labels, valid, tau, f"{str(dtype).removeprefix('torch.')}, {label}, {spread}")


def _directions(generator: Generator, spread: str, batch: int, length: int, width: int) -> Tensor:
    rows = torch.randn(batch, length, width, generator=generator)
    rows = rows / rows.norm(dim=-1, keepdim=True)
    if spread == "near":
        base = torch.nn.functional.normalize(torch.randn(batch, 1, width, generator=generator), dim=-1)
        return base + 3e-4 * rows
    if spread == "opposite":
        sides = torch.randint(0, 2, (batch, length, 1), generator=generator) * 2.0 - 1
        few = rows[:, torch.randint(min(3, length), (length,), generator=generator)]
        return sides * few
    return rows


def _labels(generator: Generator, kind: str, batch: int, length: int) -> Tensor:
    if kind == "one":
        return torch.zeros(batch, length, dtype=torch.long)
    if kind == "all different":
        return torch.arange(length).expand(batch, -1).clone()
    if kind == "few":
        return torch.randint(0, 3, (batch, length), generator=generator)
    shares = 1.0 / torch.arange(1, 1001)
    return torch.multinomial(shares, batch * length, replacement=True, generator=generator).view(batch, length)
