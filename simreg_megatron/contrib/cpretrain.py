# SPDX-License-Identifier: Apache-2.0
"""CPretrain, a baseline: each token closer to the next of its label. Shapes: as in `losses._anchored`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from simreg_megatron.contrib.simcse import LARGEST_SCALE, scaled, sequence_losses, simcse_terms, whole_sequences
from simreg_megatron.losses._anchored import (
    REDUCTIONS,
    BlockTerms,
    check_choice,
    cosine_logits,
    log_sum,
    reduced,
    spread,
)
from simreg_megatron.losses._chunks import Block, checked, label_pairs
from simreg_megatron.objectives import Kind, Objective, Options, Scalar

SAME_LABEL = ("masked", "kept")


def cpretrain_loss(
    embeddings: Tensor,
    labels: Tensor,
    *,
    temperature: float = 0.1,
    same_label: str = "masked",
    level: str = "token",
    log_scale: Tensor | None = None,
    valid: Tensor | None = None,
    documents: Tensor | None = None,
    chunk_size: int = 0,
    reduction: str = "mean",
) -> Tensor:
    """L = 1/2 mean_m [ -log softmax_l( cos(a_m, b_l) / tau )_m - log softmax_l( cos(b_m, a_l) / tau )_m ].

    The pairs (a_m, b_m) of a chunk are the consecutive occurrences of each label; all other pairs are negatives. A
    chunk with fewer than two pairs has loss 0.

    Args:
        embeddings, labels, valid, documents, chunk_size: as in `simreg_loss`.
        temperature: tau, above 0: one over the scale of the original.
        level: "token" as above; "sequence": the pairs are the means of the two halves of each sequence of the batch;
            chunks and documents are ignored, and same_label and reduction must be the defaults.
        log_scale: a trained scalar theta: exp(min(theta, log 100)) replaces 1 / tau. Above the limit theta still gets
            the gradient at the limit, so that it can come back.
        same_label: "masked" leaves other pairs of the same label out of both softmaxes; "kept" has them as negatives.
        reduction: as in `creg_loss`.

    Raises:
        ValueError: an argument is out of range, or shapes or types do not fit.

    Source: our adaptation of Neelakantan et al. 2022 (symmetric in-batch InfoNCE) to tokens of pretraining. The pairs,
    the mask, halves for sequences, and a fixed scale by default in the place of a learned one are our choices.
    """
    check_choice("level", level, ("token", "sequence"))
    check_choice("reduction", reduction, REDUCTIONS if level == "token" else ("mean",))
    check_choice("same_label", same_label, SAME_LABEL if level == "token" else ("masked",))
    if level == "sequence":
        return _sequence_loss(embeddings, labels, valid, scaled(temperature, log_scale))
    block_terms = cpretrain_terms(temperature=temperature, same_label=same_label, log_scale=log_scale)
    return reduced(block_terms, embeddings, labels, valid, documents, chunk_size, reduction)


def _sequence_loss(embeddings: Tensor, labels: Tensor, valid: Tensor | None, temperature: float | Tensor) -> Tensor:
    embeddings, labels, usable, _ = checked(embeddings, labels, valid)
    first, second, takes_part = whole_sequences(embeddings, labels, usable, view="halves", pooling="mean")
    there = sequence_losses(first, second, takes_part, takes_part, 0, temperature)
    back = sequence_losses(second, first, takes_part, takes_part, 0, temperature)
    return (there + back).sum() / (2 * takes_part.sum().clamp(min=1))


def cpretrain_terms(
    *, temperature: float = 0.1, same_label: str = "masked", log_scale: Tensor | None = None
) -> BlockTerms:
    """Compute the same for the anchors of one block of chunks, after a check of the options."""
    check_choice("same_label", same_label, SAME_LABEL)
    tau = scaled(temperature, log_scale)

    def terms(block: Block) -> Tensor:
        logits, own = cosine_logits(block, tau), slice(*block.anchors)
        same, different = label_pairs(block)
        follower, leader = _neighbours(block)
        losses, counted = torch.zeros_like(logits[..., 0]), torch.zeros_like(same[..., 0])
        for partner, partners in ((follower, leader.any(dim=-1)), (leader, follower.any(dim=-1))):
            target = partner[:, own]
            candidates = (different if same_label == "masked" else same | different) & partners.unsqueeze(-2)
            loss = log_sum(logits, candidates | target) - torch.where(target, logits, 0.0).sum(dim=-1)
            losses = losses + torch.where(target.any(dim=-1), loss, 0.0) / 2
            counted = counted | target.any(dim=-1)
        num_pairs = follower.any(dim=-1).sum(dim=-1)
        counted = counted & (num_pairs > 1).unsqueeze(-1)
        return spread(losses, counted, num_pairs, block.usable)

    return terms


def _neighbours(block: Block) -> tuple[Tensor, Tensor]:
    """Return two bool [m, k, k]: whether column j is the next occurrence of row i's label, and the one before."""
    same, _ = label_pairs(block._replace(anchors=(0, block.labels.shape[-1])))
    later = same.triu(1)
    follower = later & (later.cumsum(dim=-1, dtype=torch.int32) == 1)
    return follower, follower.mT


def _terms(*of_sequences: Any, **of_chunks: Any) -> Any:
    """Compute the terms of whole sequences, whose kind has positional parameters, or of blocks of chunks."""
    if of_sequences:
        return simcse_terms(*of_sequences, symmetric=True)  # type: ignore[misc]  # the five leave it
    return cpretrain_terms(**of_chunks)


def _check(options: Options, temperature: float, _: int) -> None:
    if options["scale"] == "learned" and temperature * LARGEST_SCALE <= 1:
        raise ValueError(
            f"scale=learned starts at 1 / temperature and grows up to {LARGEST_SCALE:g}: give a temperature above "
            f"{1 / LARGEST_SCALE:g}, not {temperature:g}"
        )


def _scalars(options: Options, temperature: float) -> dict[str, Scalar]:
    if options["scale"] != "learned":
        return {}
    return {"log_scale": Scalar(-math.log(temperature), "simreg scale", "exp", most=LARGEST_SCALE)}


CPRETRAIN = Objective(
    name="cpretrain", kind=Kind.PAIRS, temperature=0.1, terms=_terms,
    kind_of=lambda options: Kind.SEQUENCES if options["level"] == "sequence" else Kind.PAIRS,
    asks="each token closer to the next of its label than to those of other pairs",
    options={"same_label": SAME_LABEL, "level": ("token", "sequence"), "scale": ("fixed", "learned")},
    idle_with={"same_label": {"level": "sequence"}}, other_options=("level", "scale"),
    check=_check, scalars=_scalars,
    takes_rows=lambda options: options["level"] == "sequence",
    invariant=("scale", "rotation", "names"),
)  # fmt: skip
