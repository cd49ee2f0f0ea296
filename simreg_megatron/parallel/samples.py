# SPDX-License-Identifier: Apache-2.0
"""Objectives of sums over a sample, and of whole sequences: every rank adds its own tokens, and sums alone travel.

Shapes: B micro-batch, A anchors of this rank, D hidden; s samples in each sequence, or sequences, B or those of all
data-parallel ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from simreg_megatron.config import SimRegConfig
from simreg_megatron.losses._anchored import doubt
from simreg_megatron.losses._chunks import chunk_length
from simreg_megatron.losses.cpretrain import scaled
from simreg_megatron.losses.dispersion import dispersion_value
from simreg_megatron.losses.mic import MICOptions, mic_value, pools_tokens
from simreg_megatron.losses.roles import random_numbers
from simreg_megatron.losses.sigreg import (
    NUM_DIRECTIONS,
    in_samples,
    normalized,
    random_directions,
    spread,
    statistic,
    wave_sums,
)
from simreg_megatron.losses.simcse import Pooled, first_part, last_positions, pooled, sequence_losses, two_views
from simreg_megatron.notices import log_once
from simreg_megatron.parallel.collectives import sum_over
from simreg_megatron.parallel.pairs import View
from simreg_megatron.parallel.shard import SequenceShard

Replicas = Callable[[], dist.ProcessGroup]
"""Returns the group of the ranks with other sequences; called only by objectives that compare these."""


class OwnTokens(NamedTuple):
    """This rank's anchors, in the order of its rows."""

    embeddings: Tensor  # [B, A, D]
    labels: Tensor  # [B, A]
    usable: Tensor  # bool [B, A]
    positions: Tensor  # int64 [A], on the sequence


def own_tokens(views: list[View], shard: SequenceShard) -> OwnTokens:
    embeddings, labels, usable = (
        torch.cat([per_token[:, slice(*view.anchors)] for per_token, view in zip(found, views, strict=True)], dim=1)
        for found in zip(*((view.embeddings, view.labels, view.usable) for view in views), strict=True)
    )
    runs = shard.layout.anchors(shard.rank)
    positions = torch.cat([torch.arange(first, last, device=embeddings.device) for first, last in runs])
    return OwnTokens(embeddings, labels, usable, positions)


def sum_over_sequence(part: Tensor, shard: SequenceShard) -> Tensor:
    """Sum over the ranks that share the sequences; the backward is the same sum of their gradients."""
    for group in shard.anchor_groups:
        part = sum_over(part, group)
    return part


def sigreg_terms(
    config: SimRegConfig, views: list[View], shard: SequenceShard, iteration: int, replicas: Replicas
) -> Tensor:
    """Compute T of each anchor's sample, [B, A]; 0 if a token is in none. A collective if a sample spans ranks.

    Directions follow from the iteration: all micro-batches of a step share them, however a step is cut into these.
    """
    options, tokens = config.options, own_tokens(views, shard)
    estimator, sample = str(options["estimator"]), str(options["sample"])
    directions = random_directions(
        int(options["directions"]) or NUM_DIRECTIONS[estimator],
        tokens.embeddings.shape[-1],
        seed=int(options["seed"]),
        iteration=iteration,
        device=tokens.embeddings.device,
    )
    rows = normalized(tokens.embeddings, tokens.usable, str(options["normalize"]))
    if sample == "chunk":
        size = chunk_length(shard.layout.length, config.chunk_size)
        members = in_samples(tokens.usable, tokens.positions // size, -(-shard.layout.length // size))
    else:  # one sample, of one long sequence
        rows, members = rows.flatten(0, 1).unsqueeze(0), tokens.usable.reshape(1, 1, -1)
    sums = sum_over_sequence(wave_sums(rows, members, directions, estimator), shard)
    counts = sum_over_sequence(members.sum(dim=-1), shard)
    if sample == "replicas":
        sums, counts = (sum_over(part, replicas()) for part in (sums, counts))
    return spread(statistic(sums, counts, estimator), members).reshape(tokens.usable.shape)


def mic_terms(
    config: SimRegConfig, views: list[View], shard: SequenceShard, iteration: int, replicas: Replicas
) -> Tensor:
    """Compute L of the micro-batch for each anchor, [B, A]; 0 if a token does not count. A collective.

    Iteration and other replicas change nothing here.
    """
    tokens, options = own_tokens(views, shard), mic_options(config)
    alone = pools_tokens(options, len(tokens.usable), shard.layout.length, config.chunk_size)
    if alone and options.pool != "token":
        log_once(f"SimReg objective mic: a micro-batch has one {options.pool} here, so tokens stand by themselves")
    value = mic_value(
        tokens.embeddings,
        tokens.usable,
        tokens.positions,
        shard.layout.length,
        options=options,
        chunk_size=config.chunk_size,
        add=lambda part: sum_over_sequence(part, shard),
    )
    return torch.where(tokens.usable, value, 0.0)


def mic_options(config: SimRegConfig) -> MICOptions:
    return MICOptions(**{**config.options, "prefixes": config.prefixes})  # type: ignore[arg-type]


def dispersion_terms(
    config: SimRegConfig, views: list[View], shard: SequenceShard, iteration: int, replicas: Replicas
) -> Tensor:
    """Compute L of each anchor's sequence, [B, A]; 0 if a token does not count. A collective of the sampled states.

    All micro-batches of a step draw the same positions. Other replicas change nothing here.
    """
    options, (rows, _, usable, positions) = config.options, own_tokens(views, shard)
    order = random_numbers(shard.layout.length, seed=int(options["seed"]), iteration=iteration, device=rows.device)
    given = config.tau, int(options["tokens"]), float(options["clamp"])
    values = dispersion_value(rows, usable, positions, order, *given, lambda part: sum_over_sequence(part, shard))
    return torch.where(usable, values.unsqueeze(-1) + doubt(rows), 0.0)


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
