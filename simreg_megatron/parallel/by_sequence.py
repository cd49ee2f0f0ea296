# SPDX-License-Identifier: Apache-2.0
"""Objectives that compare whole sequences: each rank pools its own tokens, and the pools alone travel.

Shapes: B micro-batch, A anchors of this rank, D hidden; s sequences, B or those of all data-parallel ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from simreg_megatron.config import SimRegConfig
from simreg_megatron.losses.cpretrain import scaled
from simreg_megatron.losses.simcse import Pooled, first_part, last_positions, pooled, sequence_losses, two_views
from simreg_megatron.parallel.collectives import sum_over
from simreg_megatron.parallel.pairs import View
from simreg_megatron.parallel.samples import Replicas, own_tokens, sum_over_sequence
from simreg_megatron.parallel.shard import SequenceShard


def simcse_terms(
    config: SimRegConfig,
    views: list[View],
    shard: SequenceShard,
    learned: Mapping[str, Tensor],
    replicas: Replicas,
    symmetric: bool = False,
) -> Tensor:
    """Give every usable token the loss of its sequence, [B, A]: a sequence weighs as much as it has tokens."""
    view = str(config.options.get("view", "halves"))
    first, second, takes_part = two_views(_pooled(config, view, views, shard), view)
    temperature = scaled(config.tau, learned.get("log_scale"))
    place, others = 0, (first, second, takes_part)
    if config.options.get("gather") == "yes":
        place, others = _gather_replicas(first, second, takes_part, replicas())
    losses = sequence_losses(first, others[1], takes_part, others[2], place, temperature)
    if symmetric:
        back = sequence_losses(second, others[0], takes_part, others[2], place, temperature)
        losses = (losses + back) / 2
    usable = torch.cat([view.usable[:, slice(*view.anchors)] for view in views], dim=1)
    return torch.where(usable, losses.unsqueeze(-1), 0.0)


cpretrain_terms = functools.partial(simcse_terms, symmetric=True)
"""The same, with the mean of both directions."""


def _pooled(config: SimRegConfig, view: str, views: list[View], shard: SequenceShard) -> Pooled:
    """Pool whole sequences from the parts of the ranks that share them."""
    embeddings, labels, usable, positions = own_tokens(views, shard)
    in_second = positions >= first_part(shard.layout.length, view)
    last = None
    if config.options.get("pooling") == "last":
        last = last_positions(usable, positions, in_second)
        for group in shard.anchor_groups:
            dist.all_reduce(last, op=dist.ReduceOp.MAX, group=group)
    parts = pooled(embeddings, labels, usable, positions, in_second, last)
    return Pooled._make(sum_over_sequence(part, shard) for part in parts)


def _gather_replicas(
    first: Tensor, second: Tensor, takes_part: Tensor, group: dist.ProcessGroup
) -> tuple[int, tuple[Tensor, Tensor, Tensor]]:
    """Gather the sequences of all data-parallel ranks [s, ...], and return where this rank's begin among them.

    Backward: every replica's loss reaches the sequences of every other.
    """
    place = group.rank() * len(first)

    def gathered(own: Tensor) -> Tensor:
        whole = own.new_zeros(group.size() * len(own), *own.shape[1:])
        whole[place : place + len(own)] = own
        return sum_over(whole, group)

    return place, (gathered(first), gathered(second), gathered(takes_part.int()) > 0)
