# SPDX-License-Identifier: Apache-2.0
"""Compute the terms of the objectives other than SimReg on this rank's tokens.

Shapes: B micro-batch, A anchors of this rank, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from simreg_megatron.config import SimRegConfig
from simreg_megatron.losses._anchored import anchored_terms
from simreg_megatron.losses.cpretrain import cpretrain_terms
from simreg_megatron.losses.creg import creg_terms
from simreg_megatron.losses.sce import sce_terms
from simreg_megatron.losses.sigmoid import sigmoid_terms, with_heads
from simreg_megatron.objectives.record import Kind, OptionKind
from simreg_megatron.parallel import samples
from simreg_megatron.parallel.pairs import View
from simreg_megatron.parallel.samples import Replicas
from simreg_megatron.parallel.shard import SequenceShard

_TERMS: dict[Kind, dict[str, Callable[..., Any]]] = {
    Kind.PAIRS: {"cpretrain": cpretrain_terms, "creg": creg_terms, "sce": sce_terms, "sigmoid": sigmoid_terms},
    Kind.SEQUENCES: {"simcse": samples.simcse_terms, "cpretrain": samples.cpretrain_terms},
    Kind.SUMS: {"sigreg": samples.sigreg_terms, "mic": samples.mic_terms, "dispersion": samples.dispersion_terms},
}
"""The functions that compute the terms of each objective of this package; see `Kind` for their parameters."""
_SWITCH = {"yes": True, "no": False}


def objective_terms(
    config: SimRegConfig,
    views: list[View],
    shard: SequenceShard,
    learned: Mapping[str, Tensor],
    iteration: int,
    replicas: Replicas,
) -> Tensor:
    """Compute term_i of every anchor of this rank, [B, A], in the order of its rows; a collective for some kinds.

    Args:
        learned: the scalars that the settings train, by name.
        iteration: of the training loop, from 0.
        replicas: returns the group of the ranks with other sequences.
    """
    kind = config.record.kind_with(config.options)
    terms = config.record.terms or _TERMS[kind][config.objective]
    found: Tensor
    if kind is Kind.SUMS:
        found = terms(config, views, shard, iteration, replicas)
    elif kind is Kind.SEQUENCES:
        found = terms(config, views, shard, learned, replicas)
    else:
        found = _pair_terms(config, views, terms(**(_options(config) | dict(learned))))
    return found


def _options(config: SimRegConfig) -> dict[str, Any]:
    """Return the options that the terms of pairs take."""
    options: dict[str, Any] = {
        name: _SWITCH.get(str(value), value) if _is_switch(config.record.options[name]) else value
        for name, value in config.options.items()
        if name not in config.record.other_options
    }
    if config.meets_heads:
        options["headed"] = True
    if config.record.temperature is not None:
        options["temperature"] = config.tau
    return options


def _is_switch(known: OptionKind) -> bool:
    return isinstance(known, tuple) and set(known) == set(_SWITCH)


def _pair_terms(config: SimRegConfig, views: list[View], block_terms: Any) -> Tensor:
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
