# SPDX-License-Identifier: Apache-2.0
"""SCE, a baseline: similarities like a mixture of the labels' and the states' own. Shapes: as in `losses._anchored`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from simreg_megatron.losses._anchored import (
    BlockTerms,
    check_choice,
    check_temperature,
    cosine_logits,
    log_sum,
    reduced,
    spread,
)
from simreg_megatron.losses._chunks import Block, is_number, label_pairs, self_pairs
from simreg_megatron.objectives import Kind, Objective


def sce_loss(
    embeddings: Tensor,
    labels: Tensor,
    *,
    valid: Tensor | None = None,
    documents: Tensor | None = None,
    chunk_size: int = 0,
    reduction: str = "mean",
    **options: Any,
) -> Tensor:
    """L_i = - sum_j w_ij log p_ij,  p_i = softmax_j( cos(e_i, k_j) / tau ),  w_ij = c t_ij + (1 - c) s_ij.

    k are the same hidden states without a gradient. t_i is even over the tokens with the label of token i, s_i is
    softmax_{j != i}( cos(k_i, k_j) / tau_m ): with tau_m below tau the similarities are sharpened. w has no gradient.

    Args:
        embeddings, labels, valid, documents, chunk_size: as in `simreg_loss`.
        reduction: as in `creg_loss`.
        **options: temperature and target_temperature, tau and tau_m, above 0; 0.1 and 0.07 if not given.
            coupling: c, from 0 to 1; 0.5 if not given.
            target: "label" (default) as above; "instance": t_ij = 1 for j = i alone.
            exclude_self: leave j = i out of p and t; tokens without another positive then have w = s.

    Raises:
        ValueError: an argument is out of range, or shapes, types or devices do not fit.

    Source: our adaptation of Denize et al. 2023 to pretraining tokens, with their weights and temperatures. Labels
    instead of instances, and keys from the same forward pass, are our choices: their momentum copy would be a second
    model that runs on every micro-batch.
    """
    return reduced(sce_terms(**options), embeddings, labels, valid, documents, chunk_size, reduction)


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
    check_choice("target", target, ("label", "instance"))
    if not is_number(coupling) or not 0 <= coupling <= 1:
        raise ValueError(f"coupling must be from 0 to 1, got {coupling!r}.")
    if exclude_self and target == "instance":
        raise ValueError("exclude_self leaves target 'instance' without its only entry: use target 'label'.")

    def terms(block: Block) -> Tensor:
        same, negative = label_pairs(block)
        itself = self_pairs(block) & same
        others = (same | negative) & ~itself
        with torch.no_grad():
            found = _softmax(cosine_logits(block, target_temperature), others)
            wanted = {"label": same & ~itself if exclude_self else same, "instance": itself}[target]
            even = wanted.to(found.dtype) / wanted.sum(dim=-1, keepdim=True).clamp(min=1)
            weights = coupling * even + (1 - coupling) * found
            if exclude_self:
                weights = torch.where(wanted.any(dim=-1, keepdim=True), weights, found)
        logits = cosine_logits(block, temperature, keys=block.rows.detach())
        members = others if exclude_self else same | negative
        losses = (weights * (log_sum(logits, members).unsqueeze(-1) - logits)).sum(dim=-1)
        counted = block.usable[:, slice(*block.anchors)]
        return spread(losses, counted, block.usable.sum(dim=-1), block.usable)

    return terms


def _softmax(logits: Tensor, members: Tensor) -> Tensor:
    """Over the members of the last dimension; all 0 where there are none."""
    shares = (logits - log_sum(logits, members).unsqueeze(-1)).exp()
    return torch.where(members, shares, 0.0)


SCE = Objective(
    name="sce", kind=Kind.PAIRS, temperature=0.1, terms=sce_terms,
    asks="similarities like a mixture of the labels' and the states' own",
    options={
        "target": ("label", "instance"), "exclude_self": ("no", "yes"), "coupling": 0.5, "target_temperature": 0.07,
    },
    limits={"coupling": (0, 1), "target_temperature": (1e-4, 1e4)},
    idle_with={"target_temperature": ("coupling", 1), "target": ("coupling", 0)},
    excludes={("exclude_self=yes", "target=instance"):
              "exclude_self=yes leaves target=instance without its only entry: use target=label"},
    not_offered={("keys", "ema"): "it needs a second model whose weights follow the first: leave the option out"},
    invariant=("scale", "rotation", "names", "order"),
)  # fmt: skip
