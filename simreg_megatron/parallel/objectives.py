# SPDX-License-Identifier: Apache-2.0
"""Compute the terms of the objectives other than SimReg on this rank's tokens.

Of sums over a sample, and of whole sequences, every rank adds its own tokens, and sums alone travel.

Shapes: B micro-batch, A anchors of this rank, D hidden; s samples in each sequence, or sequences, B or those of all
data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from simreg_megatron.config import SimRegConfig
from simreg_megatron.losses._anchored import anchored_terms, with_heads
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
    terms: Any = record.terms  # SimReg alone has none
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
