# SPDX-License-Identifier: Apache-2.0
"""Quantiles of numbers that lie on several ranks, exact: counts travel, the numbers stay where they are.

A float32 is an integer of 32 bits in the same order. Its digits are found from the highest on: a table of how many
numbers have each digit, added up over the ranks, shows which one the wanted number has.

Shapes: n numbers of this rank, q shares.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_BITS = (11, 11, 10)  # of each digit
_HALF = 1 << 31


@torch.no_grad()
def quantiles_over(values: Tensor, shares: Sequence[float], groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """The smallest of all ranks' numbers [n] that at least a share of them does not exceed, of each share: float32 [q].

    NaN are left out, and it is NaN where nothing is left. A collective over the groups, one after the other; ranks may
    hold unequal numbers of them.
    """
    counted, keys = ~values.isnan(), _ordered(values)
    number = _added_up(counted.sum(), groups)
    place = (number * torch.tensor(shares, dtype=torch.float64, device=values.device) - 1e-9).ceil().long().clamp(min=1)
    found, left = torch.zeros_like(place), sum(_BITS)
    for bits in _BITS:
        left -= bits
        digits = (keys >> left) & ((1 << bits) - 1)
        members = counted & ((keys >> (left + bits)) == found.unsqueeze(1))
        table = place.new_zeros(len(place), 1 << bits).scatter_add_(1, digits.expand_as(members), members.long())
        table = _added_up(table, groups)
        up_to = table.cumsum(dim=1)
        digit = (up_to < place.unsqueeze(1)).sum(dim=1).clamp(max=(1 << bits) - 1)
        place -= (up_to - table).gather(1, digit.unsqueeze(1)).squeeze(1)
        found = (found << bits) | digit
    return torch.where(number > 0, _as_float(found), torch.nan)


def _added_up(counts: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    for group in groups:
        dist.all_reduce(counts, group=group)
    return counts


def _ordered(values: Tensor) -> Tensor:
    """float32 as int64 from 0 to 2^32 - 1 in the same order."""
    bits = values.float().view(torch.int32).long()
    return torch.where(bits < 0, ~bits, bits + _HALF)


def _as_float(keys: Tensor) -> Tensor:
    return torch.where(keys < _HALF, ~keys, keys - _HALF).to(torch.int32).view(torch.float32)
