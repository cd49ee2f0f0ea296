# SPDX-License-Identifier: Apache-2.0
"""SCE: a baseline with soft targets, half labels and half the similarities found. Shapes: as in `_anchored`."""

from __future__ import annotations

import torch
from torch import Tensor

from simreg_megatron.losses._anchored import BlockTerms, check_choice, check_temperature, log_sum, reduced, spread
from simreg_megatron.losses._chunks import Block, is_number, label_pairs, self_pairs
from simreg_megatron.losses.similarity import get_similarity

TARGETS = ("label", "instance")


def sce_loss(
    embeddings: Tensor,
    labels: Tensor,
    *,
    temperature: float = 0.1,
    target_temperature: float = 0.07,
    coupling: float = 0.5,
    target: str = "label",
    exclude_self: bool = False,
    valid: Tensor | None = None,
    documents: Tensor | None = None,
    chunk_size: int = 0,
    reduction: str = "mean",
) -> Tensor:
    """L_i = - sum_j w_ij log p_ij,  p_i = softmax_j( cos(e_i, k_j) / tau ),  w_ij = c t_ij + (1 - c) s_ij.

    k are the same hidden states without a gradient. t_i is even over the tokens with the label of token i, s_i is
    softmax_{j != i}( cos(k_i, k_j) / tau_m ): with tau_m below tau the similarities are sharpened. w has no gradient.

    Args:
        embeddings, labels, valid, documents, chunk_size: as in `simreg_loss`.
        temperature, target_temperature: tau and tau_m, above 0.
        coupling: c, from 0 to 1.
        target: "label" as above; "instance": t_ij = 1 for j = i alone.
        exclude_self: leave j = i out of p and t; tokens without another positive then have w = s.
        reduction: as in `creg_loss`.

    Raises:
        ValueError: an argument is out of range, or shapes, types or devices do not fit.

    Source: our adaptation of Denize et al. 2023 to pretraining tokens, with their weights and temperatures. Labels
    instead of instances, and keys from the same forward pass, are our choices: their momentum copy would be a second
    model that runs on every micro-batch.
    """
    block_terms = sce_terms(
        temperature=temperature,
        target_temperature=target_temperature,
        coupling=coupling,
        target=target,
        exclude_self=exclude_self,
    )
    return reduced(block_terms, embeddings, labels, valid, documents, chunk_size, reduction)


def sce_terms(
    *,
    temperature: float = 0.1,
    target_temperature: float = 0.07,
    coupling: float = 0.5,
    target: str = "label",
    exclude_self: bool = False,
) -> BlockTerms:
    """The same for the anchors of one block of chunks, its options checked."""
    check_temperature("temperature", temperature)
    check_temperature("target_temperature", target_temperature)
    check_choice("target", target, TARGETS)
    if not is_number(coupling) or not 0 <= coupling <= 1:
        raise ValueError(f"coupling must be from 0 to 1, got {coupling!r}.")
    if exclude_self and target == "instance":
        raise ValueError("exclude_self leaves target 'instance' without its only entry: use target 'label'.")

    def terms(block: Block) -> Tensor:
        same, negative = label_pairs(block)
        itself = self_pairs(block) & same
        others = (same | negative) & ~itself
        with torch.no_grad():
            found = _softmax(_logits(block, block.rows, target_temperature), others)
            wanted = {"label": same & ~itself if exclude_self else same, "instance": itself}[target]
            even = wanted.to(found.dtype) / wanted.sum(dim=-1, keepdim=True).clamp(min=1)
            weights = coupling * even + (1 - coupling) * found
            if exclude_self:
                weights = torch.where(wanted.any(dim=-1, keepdim=True), weights, found)
        logits, members = _logits(block, block.rows.detach(), temperature), others if exclude_self else same | negative
        losses = (weights * (log_sum(logits, members).unsqueeze(-1) - logits)).sum(dim=-1)
        counted = block.usable[:, slice(*block.anchors)]
        return spread(losses, counted, block.usable.sum(dim=-1), block.usable)

    return terms


def _logits(block: Block, keys: Tensor, temperature: float) -> Tensor:
    """cos(e_i, k_j) / tau less that of the token with itself, [m, p, k]."""
    anchors = block.rows[:, slice(*block.anchors)]
    return get_similarity("cosine")(anchors, keys, temperature).masked_fill(self_pairs(block), 0.0)


def _softmax(logits: Tensor, members: Tensor) -> Tensor:
    """Over the members of the last dimension; all 0 where there are none."""
    shares = (logits - log_sum(logits, members).unsqueeze(-1)).exp()
    return torch.where(members, shares, 0.0)
