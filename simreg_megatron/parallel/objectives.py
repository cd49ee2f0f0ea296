# SPDX-License-Identifier: Apache-2.0
"""Compute the terms of the objectives other than SimReg on this rank's tokens.

Of sums over a sample, and of whole sequences, every rank adds its own tokens, and sums alone travel.

Shapes: B micro-batch, A anchors of this rank, D hidden; s samples in each sequence, or sequences, B or those of all
data-parallel ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from simreg_megatron.config import SimRegConfig
from simreg_megatron.losses import sigreg, simcse
from simreg_megatron.losses._anchored import anchored_terms, doubt
from simreg_megatron.losses._chunks import chunk_length
from simreg_megatron.losses.baselines import cpretrain_terms, creg_terms, scaled, sce_terms
from simreg_megatron.losses.dispersion import dispersion_value
from simreg_megatron.losses.mic import MICOptions, mic_value, pools_tokens
from simreg_megatron.losses.roles import random_numbers
from simreg_megatron.losses.sigmoid import sigmoid_terms, with_heads
from simreg_megatron.notices import log_once
from simreg_megatron.objectives.record import Kind
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

    Directions follow from the iteration: all micro-batches of a step share them.
    """
    options, tokens = config.options, own_tokens(views, shard)
    estimator, sample = str(options["estimator"]), str(options["sample"])
    number, drawn_by = int(options["directions"]) or sigreg.NUM_DIRECTIONS[estimator], int(options["seed"])
    width, device = tokens.embeddings.shape[-1], tokens.embeddings.device
    directions = sigreg.random_directions(number, width, seed=drawn_by, iteration=iteration, device=device)
    rows = sigreg.normalized(tokens.embeddings, tokens.usable, str(options["normalize"]))
    if sample == "chunk":
        size = chunk_length(shard.layout.length, config.chunk_size)
        members = sigreg.in_samples(tokens.usable, tokens.positions // size, -(-shard.layout.length // size))
    else:  # one sample, of one long sequence
        rows, members = rows.flatten(0, 1).unsqueeze(0), tokens.usable.reshape(1, 1, -1)
    sums = sum_over_sequence(sigreg.wave_sums(rows, members, directions, estimator), shard)
    counts = sum_over_sequence(members.sum(dim=-1), shard)
    if sample == "replicas":
        sums, counts = (sum_over(part, replicas()) for part in (sums, counts))
    return sigreg.spread(sigreg.statistic(sums, counts, estimator), members).reshape(tokens.usable.shape)


def mic_terms(
    config: SimRegConfig, views: list[View], shard: SequenceShard, iteration: int, replicas: Replicas
) -> Tensor:
    """Compute L of the micro-batch for each anchor, [B, A]; 0 if a token does not count. A collective."""
    tokens = own_tokens(views, shard)
    options = MICOptions(**{**config.options, "prefixes": config.prefixes})  # type: ignore[arg-type]
    alone = pools_tokens(options, len(tokens.usable), shard.layout.length, config.chunk_size)
    if alone and options.pool != "token":
        log_once(f"SimReg objective mic: a micro-batch has one {options.pool} here, so tokens stand by themselves")
    value = mic_value(
        tokens.embeddings, tokens.usable, tokens.positions, shard.layout.length,
        options=options, chunk_size=config.chunk_size, add=lambda part: sum_over_sequence(part, shard),
    )  # fmt: skip
    return torch.where(tokens.usable, value, 0.0)


def dispersion_terms(
    config: SimRegConfig, views: list[View], shard: SequenceShard, iteration: int, replicas: Replicas
) -> Tensor:
    """Compute L of each anchor's sequence, [B, A]; 0 if a token does not count. A collective of the sampled states.

    All micro-batches of a step draw the same positions.
    """
    options, (rows, _, usable, positions) = config.options, own_tokens(views, shard)
    order = random_numbers(shard.layout.length, seed=int(options["seed"]), iteration=iteration, device=rows.device)
    given = config.tau, int(options["tokens"]), float(options["clamp"])
    values = dispersion_value(rows, usable, positions, order, *given, lambda part: sum_over_sequence(part, shard))
    return torch.where(usable, values.unsqueeze(-1) + doubt(rows), 0.0)


def simcse_terms(
    config: SimRegConfig, views: list[View], shard: SequenceShard, learned: Mapping[str, Tensor], replicas: Replicas,
    symmetric: bool = False,
) -> Tensor:  # fmt: skip
    """Give every usable token the loss of its sequence, [B, A]; `symmetric` takes the mean of both directions."""
    view, (embeddings, labels, usable, positions) = str(config.options.get("view", "halves")), own_tokens(views, shard)
    in_second, last = positions >= simcse.first_part(shard.layout.length, view), None
    if config.options.get("pooling") == "last":
        last = simcse.last_positions(usable, positions, in_second)
        for group in shard.anchor_groups:
            dist.all_reduce(last, op=dist.ReduceOp.MAX, group=group)
    parts = simcse.pooled(embeddings, labels, usable, positions, in_second, last)
    whole = simcse.Pooled._make(sum_over_sequence(part, shard) for part in parts)
    first, second, takes_part = simcse.two_views(whole, view)
    temperature = scaled(config.tau, learned.get("log_scale"))
    place, others = 0, (first, second, takes_part)
    if config.options.get("gather") == "yes":
        place, others = _gather_replicas(first, second, takes_part, replicas())
    losses = simcse.sequence_losses(first, others[1], takes_part, others[2], place, temperature)
    if symmetric:
        back = simcse.sequence_losses(second, others[0], takes_part, others[2], place, temperature)
        losses = (losses + back) / 2
    return torch.where(usable, losses.unsqueeze(-1), 0.0)


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


_TERMS: dict[Kind, dict[str, Callable[..., Any]]] = {
    Kind.PAIRS: {"cpretrain": cpretrain_terms, "creg": creg_terms, "sce": sce_terms, "sigmoid": sigmoid_terms},
    Kind.SEQUENCES: {"simcse": simcse_terms, "cpretrain": functools.partial(simcse_terms, symmetric=True)},
    Kind.SUMS: {"sigreg": sigreg_terms, "mic": mic_terms, "dispersion": dispersion_terms},
}
"""The functions that compute the terms of each objective of this package; see `Kind` for their parameters."""


def objective_terms(
    config: SimRegConfig, views: list[View], shard: SequenceShard, learned: Mapping[str, Tensor], iteration: int,
    replicas: Replicas,
) -> Tensor:  # fmt: skip
    """Compute term_i of every anchor of this rank, [B, A], in the order of its rows; a collective for some kinds.

    Args:
        learned: the scalars that the settings train, by name.
        iteration: of the training loop, from 0.
        replicas: returns the group of the ranks with other sequences.
    """
    record, options = config.record, config.options
    kind = record.kind_with(options)
    terms = record.terms or _TERMS[kind][config.objective]
    if kind is not Kind.PAIRS:
        found: Tensor = terms(config, views, shard, iteration if kind is Kind.SUMS else learned, replicas)
        return found
    given: dict[str, Any] = {name: value for name, value in options.items() if name not in record.other_options}
    switches = ("yes", "no"), ("no", "yes")
    given |= {name: value == "yes" for name, value in given.items() if record.options[name] in switches}
    given |= {"headed": True} if config.meets_heads else {}
    given |= {"temperature": config.tau} if record.temperature is not None else {}
    block_terms = terms(**given | dict(learned))
    parts = []
    for view in views:
        rows = view.embeddings if view.heads is None else with_heads(view.embeddings, view.heads)
        where: dict[str, Any] = {"anchors": view.anchors, "documents": view.documents}
        parts.append(anchored_terms(block_terms, rows, view.labels, view.usable, chunk_size=config.chunk_size, **where))
    return torch.cat(parts, dim=1)
