# SPDX-License-Identifier: Apache-2.0
"""CReg, a baseline: each state of a label closer than all of other labels. Shapes: as in `losses._anchored`."""

from __future__ import annotations

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
from simreg_megatron.losses._chunks import Block, label_pairs, self_pairs
from simreg_megatron.losses.roles import pair_counts
from simreg_megatron.objectives import TWICE, Kind, Objective, Options

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
        ValueError: an argument is out of range, or shapes, types or devices do not fit.

    Source: our adaptation of Yin et al. 2023 to pretraining tokens; the SimReg paper (arXiv 2605.08809) mentions it as
    a baseline in one sentence. The token-level contrast follows their description; its form and the temperature are our
    choices. Their second part, consistent predictions under dropout, is left out: pretraining has no dropout, and
    dropout on the hidden states alone would cost two more products with the output layer, the largest of the model.
    """
    block_terms = creg_terms(temperature=temperature, form=form, self_positive=self_positive)
    return reduced(block_terms, embeddings, labels, valid, documents, chunk_size, reduction)


def creg_terms(*, temperature: float = 0.1, form: str = "per_positive", self_positive: str = "never") -> BlockTerms:
    """The same for the anchors of one block of chunks, its options checked."""
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


def _check(options: Options, _: float, chunk_size: int) -> None:
    if options["form"] == "per_pair" and not 0 < chunk_size <= PER_PAIR_TOKENS:
        raise ValueError(
            f"SimReg objective option form=per_pair holds chunk^3 numbers: give a chunk size of at most "
            f"{PER_PAIR_TOKENS}, not {chunk_size or '0, the whole sequence'}"
        )


CREG = Objective(
    name="creg", kind=Kind.PAIRS, temperature=0.1, terms=creg_terms,
    asks="each state of a label closer than all of other labels",
    options={"form": ("per_positive", "per_pair", "supcon_out"), "self_positive": ("never", "always")},
    check=_check, not_offered={("prediction_consistency", "yes"): TWICE},
    invariant=("scale", "rotation", "names", "order"),
)  # fmt: skip
