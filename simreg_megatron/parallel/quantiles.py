# SPDX-License-Identifier: Apache-2.0
"""Quantiles of numbers that lie on several ranks. Shapes: n numbers of this rank, q shares."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from simreg_megatron.parallel.collectives import gather


@torch.no_grad()
def quantiles_over(values: Tensor, shares: Sequence[float], groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """The smallest of all ranks' numbers [n] that at least a share of them does not exceed, of each share [q].

    NaN are left out, and it is NaN where nothing is left. A collective over the groups, one after the other; ranks may
    hold unequal numbers of them. Waits for the device.
    """
    for group in groups:
        most = torch.tensor(len(values), device=values.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        padding = values.new_full((int(most) - len(values),), torch.nan)
        values = gather(torch.cat([values, padding]), group)
    ordered = values[~values.isnan()].sort().values
    if not len(ordered):
        return values.new_full((len(shares),), torch.nan)
    places = (len(ordered) * torch.tensor(shares, dtype=torch.float64) - 1e-9).ceil().long().clamp(min=1)
    return ordered[places.to(values.device) - 1]
