# SPDX-License-Identifier: Apache-2.0
"""The terms of the chosen objective on this rank's tokens: SimReg's, or one of the baselines it is compared with.

Shapes: B micro-batch, A anchors of this rank, D hidden; s sequences, B or those of all data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from simreg_megatron.config import SimRegConfig
from simreg_megatron.losses._anchored import BlockTerms, anchored_terms
from simreg_megatron.losses._sequences import (
    Pooled,
    first_part,
    last_positions,
    pooled,
    sequence_losses,
    two_views,
)
from simreg_megatron.losses.cpretrain import cpretrain_terms, scaled
from simreg_megatron.losses.creg import creg_terms
from simreg_megatron.losses.sce import sce_terms
from simreg_megatron.losses.sigmoid import sigmoid_terms, with_heads
from simreg_megatron.parallel.collectives import sum_over
from simreg_megatron.parallel.shard import SequenceShard
from simreg_megatron.sharded.samples import Replicas, mic_terms, own_tokens, sigreg_terms, sum_over_sequence
from simreg_megatron.sharded.sequence import terms_of
from simreg_megatron.sharded.views import View

_BLOCK_TERMS: dict[str, Callable[..., BlockTerms]] = {
    "cpretrain": cpretrain_terms,
    "creg": creg_terms,
    "sce": sce_terms,
    "sigmoid": sigmoid_terms,
}
_SWITCH = {"yes": True, "no": False}
# Options that choose a way through this module, or what is trained: none of the loss.
_SEEN_HERE = ("level", "scale", "trains", "pairs", "adapter")


def objective_terms(
    config: SimRegConfig,
    views: list[View],
    shard: SequenceShard,
    learned: Mapping[str, Tensor],
    iteration: int,
    replicas: Replicas,
) -> Tensor:
    """term_i of every anchor of this rank, [B, A], in the order of its rows. A collective for those by sequence or sum.

    Args:
        learned: the scalars that the settings train, by name.
        iteration: of the training loop, from 0.
        replicas: who tells the ranks with other sequences.
    """
    if config.objective == "sigreg":
        return sigreg_terms(config, views, shard, iteration, replicas)
    if config.objective == "mic":
        return mic_terms(config, views, shard)
    if config.by_sequence:
        return _by_sequence(config, views, shard, learned.get("log_scale"), replicas)
    if config.objective not in _BLOCK_TERMS:
        exponents = (learned["query"], learned["key"]) if "query" in learned else None
        return terms_of(config, views, exponents)
    options: dict[str, Any] = {
        name: _SWITCH.get(str(value), value) for name, value in config.options.items() if name not in _SEEN_HERE
    }
    if config.meets_heads:
        options["headed"] = True
    block_terms = _BLOCK_TERMS[config.objective](temperature=config.tau, **options | dict(learned))
    return torch.cat(
        [
            anchored_terms(
                block_terms,
                view.embeddings if view.heads is None else with_heads(view.embeddings, view.heads),
                view.labels,
                view.usable,
                anchors=view.anchors,
                documents=view.documents,
                chunk_size=config.chunk_size,
            )
            for view in views
        ],
        dim=1,
    )


def _by_sequence(
    config: SimRegConfig, views: list[View], shard: SequenceShard, log_scale: Tensor | None, replicas: Replicas
) -> Tensor:
    """Every usable token carries the loss of its sequence, so a sequence weighs as much as it has tokens."""
    view = str(config.options.get("view", "halves"))
    first, second, takes_part = two_views(_pooled(config, view, views, shard), view)
    temperature = scaled(config.tau, log_scale)
    place, others = 0, (first, second, takes_part)
    if config.options.get("gather") == "yes":
        place, others = _of_all_replicas(first, second, takes_part, replicas())
    losses = sequence_losses(first, others[1], takes_part, others[2], place, temperature)
    if config.objective == "cpretrain":  # symmetric
        back = sequence_losses(second, others[0], takes_part, others[2], place, temperature)
        losses = (losses + back) / 2
    usable = torch.cat([view.usable[:, slice(*view.anchors)] for view in views], dim=1)
    return torch.where(usable, losses.unsqueeze(-1), 0.0)


def _pooled(config: SimRegConfig, view: str, views: list[View], shard: SequenceShard) -> Pooled:
    """Of whole sequences, from the parts of the ranks that share them."""
    embeddings, labels, usable, positions = own_tokens(views, shard)
    in_second = positions >= first_part(shard.layout.length, view)
    last = None
    if config.options.get("pooling") == "last":
        last = last_positions(usable, positions, in_second)
        for group in shard.anchor_groups:
            dist.all_reduce(last, op=dist.ReduceOp.MAX, group=group)
    parts = pooled(embeddings, labels, usable, positions, in_second, last)
    return Pooled._make(sum_over_sequence(part, shard) for part in parts)


def _of_all_replicas(
    first: Tensor, second: Tensor, takes_part: Tensor, group: dist.ProcessGroup
) -> tuple[int, tuple[Tensor, Tensor, Tensor]]:
    """Where this rank's sequences lie among those of all data-parallel ranks, and all of them [s, ...].

    Backward: every replica's loss reaches the sequences of every other.
    """
    place = group.rank() * len(first)

    def gathered(own: Tensor) -> Tensor:
        whole = own.new_zeros(group.size() * len(own), *own.shape[1:])
        whole[place : place + len(own)] = own
        return sum_over(whole, group)

    return place, (gathered(first), gathered(second), gathered(takes_part.int()) > 0)
