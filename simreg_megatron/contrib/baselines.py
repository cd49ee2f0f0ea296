# SPDX-License-Identifier: Apache-2.0
"""CReg and SCE, baselines that compare the tokens of a chunk. Shapes: as in `losses._anchored`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from simreg_megatron.losses._anchored import (
    BlockTerms,
    check_choice,
    check_temperature,
    cosine_logits,
    log_sum,
    mean_over,
    reduced,
    spread,
)
from simreg_megatron.losses._chunks import Block, is_number, label_pairs, self_pairs
from simreg_megatron.losses.roles import pair_counts
from simreg_megatron.objectives import Kind, Objective, Options

PER_PAIR_TOKENS = 256  # longest chunk of form "per_pair", which holds chunk^3 numbers


def creg_loss(
    embeddings: Tensor,
    labels: Tensor,
    *,
    temperature: float = 0.1,
    valid: Tensor | None = None,
    documents: Tensor | None = None,
    chunk_size: int = 0,
    form: str = "per_positive",
    self_positive: str = "never",
    reduction: str = "mean",
) -> Tensor:
    """L_i = mean_{p in P_i} -log( exp(s_ip) / ( exp(s_ip) + sum_{q in N_i} exp(s_iq) ) ), s = cos / tau.

    P_i are the other tokens of the chunk with the label of token i, N_i those with another label. Unlike SimReg, which
    compares the two sums, every positive must win on its own, and the loss has no upper bound as tau goes to 0.

    Args:
        embeddings, labels, valid, documents, chunk_size: as in `simreg_loss`.
        temperature: tau, above 0.
        form: "per_positive" is the equation above; "per_pair": mean over p in P_i and q in N_i of
            softplus(s_iq - s_ip), every pair a problem of its own, for chunks of at most PER_PAIR_TOKENS tokens;
            "supcon_out": the denominator is the sum over all j != i.
        self_positive: "always" counts i among P_i, so that every token has a loss; "never" leaves out tokens
            without another positive.
        reduction: "none": [b, n] or [n], where each chunk's mean is spread over its tokens; "sum" of these; or
            "mean" over the valid tokens.

    Raises:
        ValueError: an argument is out of range, or shapes or types do not fit.

    Source: our adaptation of Yin et al. 2023 to pretraining tokens; the SimReg paper (arXiv 2605.08809) mentions it as
    a baseline in one sentence. The token-level contrast follows their description; its form and the temperature are our
    choices. Their second part, consistent predictions under dropout, is left out: pretraining has no dropout, and
    dropout on the hidden states alone would cost two more products with the output layer, the largest of the model.
    """
    block_terms = creg_terms(temperature=temperature, form=form, self_positive=self_positive)
    return reduced(block_terms, embeddings, labels, valid, documents, chunk_size, reduction)


def creg_terms(*, temperature: float = 0.1, form: str = "per_positive", self_positive: str = "never") -> BlockTerms:
    """Compute the same for the anchors of one block of chunks, after a check of the options."""
    check_temperature("temperature", temperature)
    check_choice("form", form, tuple(_LOSSES))
    check_choice("self_positive", self_positive, ("never", "always"))

    def terms(block: Block) -> Tensor:
        logits, (same, negative) = cosine_logits(block, temperature), label_pairs(block)
        positive = same if self_positive == "always" else same & ~self_pairs(block)
        losses = _LOSSES[form](logits, positive, negative, (same & ~self_pairs(block)) | negative)
        have_loss = block.usable  # of all tokens of the chunk, anchors of this rank or not
        if self_positive == "never":
            have_loss = pair_counts(block.labels, block.usable, documents=block.documents)[0] > 0
        return spread(losses, positive.any(dim=-1), have_loss.sum(dim=-1), block.usable)

    return terms


def _per_positive(logits: Tensor, positive: Tensor, negative: Tensor, others: Tensor) -> Tensor:
    return mean_over(F.softplus(log_sum(logits, negative).unsqueeze(-1) - logits, threshold=60), positive)


def _per_pair(logits: Tensor, positive: Tensor, negative: Tensor, others: Tensor) -> Tensor:
    if logits.shape[-1] > PER_PAIR_TOKENS:
        raise ValueError(
            f"form 'per_pair' holds chunk_size^3 numbers, so it needs chunks of at most {PER_PAIR_TOKENS} "
            f"tokens, got {logits.shape[-1]}: use a smaller chunk size."
        )
    pairs = F.softplus(logits.unsqueeze(-2) - logits.unsqueeze(-1), threshold=60)  # [m, p, positive, negative]
    of_pairs = (positive.unsqueeze(-1) & negative.unsqueeze(-2)).flatten(-2)
    return mean_over(pairs.flatten(-2), of_pairs)


def _supcon_out(logits: Tensor, positive: Tensor, negative: Tensor, others: Tensor) -> Tensor:
    losses = mean_over(log_sum(logits, others).unsqueeze(-1) - logits, positive)
    return torch.where(others.any(dim=-1), losses, 0.0)  # alone in its chunk


_LOSSES = {"per_positive": _per_positive, "per_pair": _per_pair, "supcon_out": _supcon_out}


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
        ValueError: an argument is out of range, or shapes or types do not fit.

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
    """Compute the same for the anchors of one block of chunks, after a check of the options."""
    check_temperature("temperature", temperature)
    check_temperature("target_temperature", target_temperature)
    check_choice("target", target, ("label", "instance"))
    if not is_number(coupling) or not 0 <= coupling <= 1:
        raise ValueError(f"coupling must be from 0 to 1, got {coupling!r}.")
    if not isinstance(exclude_self, bool):
        raise ValueError(f"exclude_self must be True or False, got {exclude_self!r}.")
    if exclude_self and target == "instance":
        raise ValueError("exclude_self leaves target 'instance' without its only entry: use target 'label'.")

    def terms(block: Block) -> Tensor:
        same, negative = label_pairs(block)
        itself = self_pairs(block) & same
        others = (same | negative) & ~itself
        with torch.no_grad():
            softmax = _softmax(cosine_logits(block, target_temperature), others)
            wanted = {"label": same & ~itself if exclude_self else same, "instance": itself}[target]
            even = wanted.to(softmax.dtype) / wanted.sum(dim=-1, keepdim=True).clamp(min=1)
            weights = coupling * even + (1 - coupling) * softmax
            if exclude_self:
                weights = torch.where(wanted.any(dim=-1, keepdim=True), weights, softmax)
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


def _check(options: Options, _: float, chunk_size: int) -> None:
    if options["form"] == "per_pair" and not 0 < chunk_size <= PER_PAIR_TOKENS:
        raise ValueError(
            f"SimReg objective option form=per_pair holds chunk^3 numbers: give a chunk size of at most "
            f"{PER_PAIR_TOKENS}, not {chunk_size or '0, the whole sequence'}"
        )


CREG = Objective(
    name="creg", kind=Kind.PAIRS, temperature=0.1, terms=creg_terms,
    asks="each state of a label closer than all of other labels",
    options={"form": tuple(_LOSSES), "self_positive": ("never", "always")},
    check=_check, invariant=("scale", "rotation", "names", "order"),
)  # fmt: skip
SCE = Objective(
    name="sce", kind=Kind.PAIRS, temperature=0.1, terms=sce_terms,
    asks="similarities like a mixture of the labels' and the states' own",
    options={
        "target": ("label", "instance"), "exclude_self": ("no", "yes"), "coupling": 0.5, "target_temperature": 0.07,
    },
    limits={"coupling": (0, 1), "target_temperature": (1e-4, 1e4)},
    idle_with={"target_temperature": {"coupling": 1, "exclude_self": "no"}, "target": {"coupling": 0}},
    excludes={("exclude_self=yes", "target=instance"):
              "exclude_self=yes leaves target=instance without its only entry: use target=label"},
    invariant=("scale", "rotation", "names", "order"),
)  # fmt: skip
