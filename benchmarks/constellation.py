# SPDX-License-Identifier: Apache-2.0
"""How well two sets of rows that belong together in pairs are told apart: for the synthetic experiments of the sigmoid
loss, where such pairs are all there is.

Shapes: n rows of each set, d features.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from simreg_megatron.kernels.precision import product
from simreg_megatron.losses.similarity import unit_rows

_ROWS_AT_ONCE = 4096  # whose cosines with all others are in memory


class Constellation(NamedTuple):
    """How well two sets of rows that belong together in pairs are told apart by a threshold on their cosines."""

    margin: Tensor  # m* = (smallest cosine of a pair - largest of all others) / 2; above 0 where one threshold does
    bias: Tensor  # b* = (smallest + largest) / 2, the threshold in the middle
    accuracy: Tensor  # share of rows of the first set whose nearest one of the second is their partner
    gap: Tensor  # |mean of the first - mean of the second|
    shift: Tensor  # variance of the differences inside pairs: 0 where the sets are shifted copies of each other


@torch.no_grad()
def constellation(one: Tensor, other: Tensor) -> Constellation:
    """Of rows [n, d] and their partners [n, d], n at least 2; in at least float32.

    Source: Bangachev, Bresler, Noman and Polyanskiy 2025 (margin, relative bias, linear shift).
    """
    dtype = torch.promote_types(one.dtype, torch.float32)
    one, other = unit_rows(one.to(dtype)), unit_rows(other.to(dtype))
    numbers = torch.arange(len(one), device=one.device)
    paired, hardest, nearest = [], [], []
    for rows in numbers.split(_ROWS_AT_ONCE):
        cosines = product(one[rows], other.mT)
        itself = rows.unsqueeze(-1) == numbers
        paired.append(cosines[itself])
        hardest.append(cosines.masked_fill(itself, -math.inf).amax(dim=-1))
        nearest.append(cosines.argmax(dim=-1) == rows)
    least, most = torch.cat(paired).amin(), torch.cat(hardest).amax()
    differences = one - other
    mean = differences.mean(dim=0)
    return Constellation(
        margin=(least - most) / 2,
        bias=(least + most) / 2,
        accuracy=torch.cat(nearest).to(dtype).mean(),
        gap=mean.norm(),
        shift=differences.square().sum(dim=-1).mean() - mean.square().sum(),
    )
