# SPDX-License-Identifier: Apache-2.0
"""The terms of the chosen objective on this rank's tokens: SimReg's, or one of the baselines it is compared with.

Shapes: B micro-batch, A anchors of this rank, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from simreg_megatron.config import BY_SEQUENCE, SimRegConfig
from simreg_megatron.losses._anchored import BlockTerms, anchored_terms
from simreg_megatron.losses.cpretrain import cpretrain_terms
from simreg_megatron.losses.creg import creg_terms
from simreg_megatron.losses.sce import sce_terms
from simreg_megatron.losses.simcse import half_sums, sequence_losses
from simreg_megatron.parallel.collectives import sum_over
from simreg_megatron.parallel.shard import SequenceShard
from simreg_megatron.plugin.sequence import terms_of
from simreg_megatron.plugin.views import View

_BLOCK_TERMS: dict[str, Callable[..., BlockTerms]] = {
    "cpretrain": cpretrain_terms,
    "creg": creg_terms,
    "sce": sce_terms,
}
_SWITCH = {"yes": True, "no": False}


def objective_terms(
    config: SimRegConfig,
    views: list[View],
    shard: SequenceShard,
    exponents: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """term_i of every anchor of this rank, [B, A], in the order of its rows. A collective for those by sequence."""
    if config.objective in BY_SEQUENCE:
        return _by_sequence(config, views, shard)
    if config.objective not in _BLOCK_TERMS:
        return terms_of(config, views, exponents)
    options = {name: _SWITCH.get(str(value), value) for name, value in config.options.items()}
    block_terms = _BLOCK_TERMS[config.objective](temperature=config.tau, **options)
    return torch.cat(
        [
            anchored_terms(
                block_terms,
                view.embeddings,
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


def _by_sequence(config: SimRegConfig, views: list[View], shard: SequenceShard) -> Tensor:
    """Every usable token carries the loss of its sequence, so a sequence weighs as much as it has tokens."""
    embeddings = torch.cat([view.embeddings[:, slice(*view.anchors)] for view in views], dim=1)
    usable = torch.cat([view.usable[:, slice(*view.anchors)] for view in views], dim=1)
    device, half = embeddings.device, (shard.layout.length + 1) // 2
    runs = shard.layout.anchors(shard.rank)
    positions = torch.cat([torch.arange(first, last, device=device) for first, last in runs])
    sums, counts = half_sums(embeddings, usable, positions >= half)
    for group in shard.anchor_groups:
        sums, counts = sum_over(sums, group), sum_over(counts, group)
    losses, _ = sequence_losses(sums, counts, config.tau)
    return torch.where(usable, losses.unsqueeze(-1), 0.0)
