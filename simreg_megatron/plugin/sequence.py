# SPDX-License-Identifier: Apache-2.0
"""SimReg on a sequence that several ranks hold together: what each must see, and the terms of its own tokens.

Each rank computes the terms of its own anchors once, against all tokens that these meet. Labels are gathered where
chunks, chunk weights or documents reach beyond a rank; hidden states travel only where a chunk does.

Shapes: S rows of this rank, B micro-batch, D hidden, K tokens in a view, A anchors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from simreg_megatron.config import BY_SEQUENCE, SimRegConfig
from simreg_megatron.losses._chunks import usable_tokens
from simreg_megatron.losses.roles import TokenRoles, token_roles
from simreg_megatron.losses.simreg import simreg_terms
from simreg_megatron.parallel.layout import Cutting, Run
from simreg_megatron.parallel.shard import Located, SequenceShard
from simreg_megatron.plugin.documents import Documents


class View(NamedTuple):
    """Some anchors of this rank and all tokens that they meet: whole chunks from their first token on."""

    embeddings: Tensor  # [B, K, D]
    labels: Tensor  # [B, K]
    usable: Tensor  # [B, K] bool
    documents: Tensor | None  # [B, K]
    anchors: Run  # positions inside K
    roles: TokenRoles  # of the anchors, [B, A]


def views_of(
    config: SimRegConfig,
    shard: SequenceShard,
    hidden_states: Tensor,
    labels: Tensor,
    valid: Tensor,
    *,
    documents: Documents | None = None,
    sample_length: int | None = None,
) -> list[View]:
    """What this rank's anchors meet, in the order of its rows. A collective wherever the plan exchanges anything.

    Args:
        hidden_states: [S, B, D] of this rank; their gradient is complete, whichever rank's anchors it came from.
        labels: [B, S] of the same tokens.
        valid: bool [B, S].
        documents: who tells the borders of documents; None where tokens of all documents meet.
        sample_length: tokens in a sample, where a row packs several.
    """
    scope = "local" if config.objective in BY_SEQUENCE else config.scope  # those need no rows of other ranks
    plan = shard.plan(Cutting(config.chunk_size, scope, sample_length))
    usable = usable_tokens(hidden_states.transpose(0, 1), labels, valid)
    by_domain = config.chunk_weight != "token" or (documents is not None and documents.needs_domain)
    beyond = plan.travels or (by_domain and config.scope == "exact")
    pairs = torch.stack([labels.long(), usable.long()], dim=-1)
    tokens: Located = shard.whole(pairs) if beyond else shard.held(pairs)
    rows = shard.rows_in_view(hidden_states, plan)

    found = []
    for window in plan.windows:
        stretch = window.domain if by_domain else window.tokens
        stretch_labels, stretch_usable = tokens.at(stretch).unbind(dim=-1)
        stretch_usable = stretch_usable.bool()
        numbers = None if documents is None else documents.of(stretch_labels, stretch)
        roles = token_roles(
            stretch_labels,
            stretch_usable,
            documents=numbers,
            chunk_size=config.chunk_size,
            group_reduce=config.group_reduce,
            self_positive=config.self_positive,
            chunk_weight=config.chunk_weight,
            dtype=rows.values.dtype,
        )
        inside = slice(*_relative(window.tokens, stretch))
        found.append(
            View(
                embeddings=rows.at(window.tokens),
                labels=stretch_labels[:, inside],
                usable=stretch_usable[:, inside],
                documents=None if numbers is None else numbers[:, inside],
                anchors=_relative(window.anchors, window.tokens),
                roles=roles.cut(*_relative(window.anchors, stretch)),
            )
        )
    return found


def terms_of(config: SimRegConfig, views: list[View]) -> Tensor:
    """term_i of every anchor of this rank, [B, anchors], in the order of its rows."""
    return torch.cat(
        [
            simreg_terms(
                view.embeddings,
                view.labels,
                view.usable,
                view.roles,
                anchors=view.anchors,
                documents=view.documents,
                chunk_size=config.chunk_size,
                temperature=config.tau,
                similarity=config.similarity,
                self_positive=config.self_positive,
                impl=config.impl,
            )
            for view in views
        ],
        dim=1,
    )


def _relative(run: Run, origin: Run) -> Run:
    return run[0] - origin[0], run[1] - origin[0]
