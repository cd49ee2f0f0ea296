# SPDX-License-Identifier: Apache-2.0
"""The frame of the baselines: one term per anchor, chunk by chunk, with the masks, borders and shards of SimReg.

Shapes: b sequences, n tokens, d features; chunks of k tokens, folded with the batch into m chunks; p anchors of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from simreg_megatron.kernels.precision import no_autocast
from simreg_megatron.losses._chunks import Block, Span, blocks, by_sequence, checked, is_number, self_pairs
from simreg_megatron.losses.similarity import get_similarity

BlockTerms = Callable[[Block], Tensor]  # [m, p]: the chunk's mean loss, spread over its tokens (see `spread`)
REDUCTIONS = ("mean", "sum", "none")


def anchored_terms(
    block_terms: BlockTerms,
    embeddings: Tensor,
    labels: Tensor,
    usable: Tensor,
    *,
    anchors: Span | None = None,
    documents: Tensor | None = None,
    chunk_size: int = 0,
) -> Tensor:
    """Compute the anchors' terms [b, number of anchors]; arguments as in `simreg_terms`."""
    anchors = (0, labels.shape[1]) if anchors is None else anchors
    parts = []
    with no_autocast(embeddings.device.type):
        for block in blocks(embeddings, labels, usable, documents, chunk_size=chunk_size, anchors=anchors):
            unsure = doubt(block.rows[:, slice(*block.anchors)])
            terms = block_terms(block)
            if terms.shape != unsure.shape:
                raise ValueError(
                    f"the terms of a block must be one for each anchor, {list(unsure.shape)}, not {list(terms.shape)}: "
                    "spread a chunk's loss over its tokens"
                )
            parts.append(by_sequence(terms + unsure, labels.shape[0]))
    if not parts:
        return embeddings[:, :0, 0].to(torch.promote_types(embeddings.dtype, torch.float32))
    return torch.cat(parts, dim=1)


def reduced(
    block_terms: BlockTerms,
    embeddings: Tensor,
    labels: Tensor,
    valid: Tensor | None,
    documents: Tensor | None,
    chunk_size: int,
    reduction: str,
) -> Tensor:
    """Check the tokens of a public loss, compute its terms, and reduce them over the tokens that take part."""
    rows, names, usable, documents = checked(embeddings, labels, valid, documents, chunk_size)
    check_choice("reduction", reduction, REDUCTIONS)
    terms = anchored_terms(block_terms, rows, names, usable, documents=documents, chunk_size=chunk_size)
    if reduction == "none":
        return terms.reshape(labels.shape)
    return terms.sum() if reduction == "sum" else terms.sum() / usable.sum().clamp(min=1)


def spread(losses: Tensor, counted: Tensor, total: Tensor, usable: Tensor) -> Tensor:
    """Write the mean of a chunk's counted losses on its tokens: their sum is that mean times the usable tokens.

    So a chunk weighs as much as it has tokens, however few of them have a loss of their own.

    Args:
        losses: [m, p] of the anchors.
        counted: bool [m, p], which of them have a loss.
        total: [m], how many of the whole chunk have one.
        usable: bool [m, k] of the whole chunk.
    """
    factor = usable.sum(dim=-1).to(losses.dtype) / total.clamp(min=1)
    return torch.where(counted, losses, 0.0) * factor.unsqueeze(-1)


def doubt(rows: Tensor) -> Tensor:
    """Return 0, but NaN for a row [..., d] that is not finite, so that it shows even without partners."""
    return rows.detach().abs().amax(dim=-1) * 0.0


def cosine_logits(block: Block, temperature: float | Tensor) -> Tensor:
    """Compute (cos(e_i, e_j) - 1) / tau [m, p, k]; exactly 0 with itself. The shift cancels in an anchor's softmax."""
    anchors = block.rows[:, slice(*block.anchors)]
    return get_similarity("cosine")(anchors, block.rows, 1.0).masked_fill(self_pairs(block), 0.0) / temperature


def log_sum(logits: Tensor, members: Tensor) -> Tensor:
    """Compute log sum exp over the members [m, p]; hugely negative, and without gradient, if there are none.

    The filling is finite, so that inf - inf never arises; a quarter of the range, so that a difference is finite, too.
    """
    return logits.masked_fill(~members, torch.finfo(logits.dtype).min / 4).logsumexp(dim=-1)


def mean_over(values: Tensor, members: Tensor) -> Tensor:
    """Average over the members of the last dimension; 0 if there are none."""
    return torch.where(members, values, 0.0).sum(dim=-1) / members.sum(dim=-1).clamp(min=1)


def check_temperature(name: str, value: float) -> None:
    if not is_number(value) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}.")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} {value!r} is not available; choose one of {', '.join(choices)}.")
