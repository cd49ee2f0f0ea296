# SPDX-License-Identifier: Apache-2.0
"""SimReg: a supervised contrastive term on the hidden states that predict the next token (arXiv 2605.08809).

Shapes: b sequences, n tokens, d features; chunks of k tokens, folded into m = b * (chunks in a sequence).
This is the reference that faster forms are judged by: one k x k matrix per chunk, plain torch, autograd.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from simreg_megatron.losses._chunks import (
    ChunkedTokens,
    as_batch,
    by_sequence,
    check_tokens,
    cut,
    label_pairs,
    no_autocast,
    self_pairs,
    unfold,
    without_self,
)
from simreg_megatron.losses.similarity import Similarity, get_similarity

GROUP_REDUCTIONS = ("sum", "mean")
SELF_POSITIVES = ("always", "only_if_alone", "never")
CHUNK_WEIGHTS = ("token", "uniform", "pos-neg-ratio", "neg-pos-ratio", "count-corrected")
REDUCTIONS = ("mean", "sum", "none")
IMPLEMENTATIONS = ("auto", "reference")


class _Pairs(NamedTuple):
    """Who is compared with whom inside each chunk."""

    positive: Tensor  # [m, k, k] bool
    negative: Tensor  # [m, k, k] bool
    anchor: Tensor  # [m, k] bool: tokens that have a term
    num_positive: Tensor  # [m, k] float, per anchor
    num_negative: Tensor  # [m, k] float, per anchor


def simreg_loss(
    embeddings: Tensor,
    labels: Tensor,
    *,
    temperature: float = 0.01,
    valid: Tensor | None = None,
    chunk_size: int = 0,
    similarity: str = "cosine",
    group_reduce: str = "sum",
    self_positive: str = "always",
    chunk_weight: str = "token",
    reduction: str = "mean",
    impl: str = "auto",
) -> Tensor:
    """R_i = softplus( log sum_{j in N_i} exp(s_ij) - log sum_{j in P_i} exp(s_ij) ), s = cos(e_i, e_j) / tau.

    P_i are the tokens of the same chunk with the label of token i (itself included), N_i those with another
    label. Labels are the ids of the tokens to predict: the targets of the cross-entropy at these positions.

    Args:
        embeddings: [b, n, d] or [n, d], float16, bfloat16, float32 or float64; sequences never meet. Computed
            in float32 (float64 for float64), outside any autocast; the gradient has the input's dtype.
        labels: integer [b, n] or [n]; a label below 0 (-100) makes the token invalid.
        temperature: tau, above 0.
        valid: bool, shape of labels. Invalid tokens are neither anchor, positive nor negative. So are tokens
            whose embedding is exactly zero. Their gradient is exactly 0.
        chunk_size: tokens in a chunk, at least 2, cut from the start of the sequence; the last may be short.
            0, or n and more: the whole sequence.
        similarity: "cosine", "dot", "qnorm" (anchor normalised) or "dnorm" (keys normalised).
        group_reduce: "sum", or "mean" over P_i and over N_i in place of the sums.
        self_positive: whether i belongs to P_i: "always", "only_if_alone" (no other positive), or "never"
            (tokens without another positive have no term, but remain negatives of others).
        chunk_weight: how the chunks of a sequence are weighed. "token": every token alike. "uniform": every
            chunk alike. "pos-neg-ratio", "neg-pos-ratio": by the number of positive over negative pairs, or
            its inverse; chunks that lack either have weight 0. These three are normalised inside each
            sequence, to its number of anchors. "count-corrected": every token alike, its two sums scaled up
            to the number of positives and negatives in the whole sequence.
        reduction: "none": [b, n] or [n], 0 at tokens without a term; "sum"; "mean": the sum divided by the
            number of anchors of all sequences, 0 where there are none.
        impl: "auto" or "reference".

    Returns:
        A tensor of float32 (float64 for float64). A token without negatives has term 0 and gradient 0.
        NaN or infinite embeddings of valid tokens give NaN.

    Raises:
        ValueError: an argument is out of range, or shapes, types or devices do not fit.

    Source: arXiv 2605.08809, Eq 3; chunks: its section on chunk-wise SimReg.
    """
    check_tokens(embeddings, labels, valid, chunk_size)
    _check_options(temperature, group_reduce, self_positive, chunk_weight, reduction, impl)
    logits_of = get_similarity(similarity)
    shape = labels.shape
    embeddings, labels, valid = as_batch(embeddings, labels, valid)
    num_sequences, num_tokens = labels.shape

    with no_autocast(embeddings.device.type):
        tokens = cut(embeddings, labels, valid, chunk_size)
        pairs = _pairs(tokens, self_positive)
        contrast = _contrast(_square_logits(tokens.rows, logits_of, temperature), pairs)
        if group_reduce == "mean":
            contrast = contrast - (_log_count(pairs.num_negative) - _log_count(pairs.num_positive))
        if chunk_weight == "count-corrected":
            contrast = contrast + _count_correction(tokens, pairs, num_sequences, self_positive)
        terms = _terms(contrast, tokens.rows, pairs.anchor)
        if chunk_weight in ("uniform", "pos-neg-ratio", "neg-pos-ratio"):
            terms = terms * _chunk_weights(chunk_weight, pairs, num_sequences)
    if reduction == "none":
        return unfold(terms, num_sequences, num_tokens).reshape(shape)
    total = terms.sum()
    return total if reduction == "sum" else total / pairs.anchor.sum().clamp(min=1)


def _check_options(
    temperature: float, group_reduce: str, self_positive: str, chunk_weight: str, reduction: str, impl: str
) -> None:
    is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not is_number or not math.isfinite(temperature) or temperature <= 0:
        raise ValueError(f"temperature must be a finite number above 0, got {temperature!r}.")
    for name, value, choices in (
        ("group_reduce", group_reduce, GROUP_REDUCTIONS),
        ("self_positive", self_positive, SELF_POSITIVES),
        ("chunk_weight", chunk_weight, CHUNK_WEIGHTS),
        ("reduction", reduction, REDUCTIONS),
        ("impl", impl, IMPLEMENTATIONS),
    ):
        if value not in choices:
            raise ValueError(f"{name} {value!r} is not available; choose one of {', '.join(choices)}.")
    if group_reduce == "mean" and chunk_weight == "count-corrected":
        raise ValueError(
            "chunk_weight 'count-corrected' has no effect with group_reduce 'mean', which does not depend on "
            "the counts; use chunk_weight 'token'."
        )


def _pairs(tokens: ChunkedTokens, self_positive: str) -> _Pairs:
    positive, negative = label_pairs(tokens)
    anchor = tokens.valid
    if self_positive != "always":
        others = without_self(positive)
        accompanied = others.any(dim=-1)
        if self_positive == "never":
            positive, anchor = others, accompanied
        else:
            positive = torch.where(accompanied.unsqueeze(-1), others, positive)
    dtype = tokens.rows.dtype
    return _Pairs(positive, negative, anchor, positive.sum(dim=-1).to(dtype), (negative.sum(dim=-1) * anchor).to(dtype))


def _square_logits(rows: Tensor, logits_of: Similarity, temperature: float) -> Tensor:
    """Shifted logits [m, k, k] of every token with every token of its chunk; exactly 0 with itself."""
    logits = logits_of(rows, rows, temperature)
    return logits.masked_fill(self_pairs(logits), 0.0)


def _contrast(logits: Tensor, pairs: _Pairs) -> Tensor:
    """L_i = LSE_{N_i}(s) - LSE_{P_i}(s), [m, k]; hugely negative where N_i is empty.

    A finite filling in place of -inf: over an empty group it leaves a number whose softplus and gradient are
    exactly 0, and inf - inf never arises, forward or backward. A quarter of the range, so that L_i is finite.
    """
    nothing = torch.finfo(logits.dtype).min / 4
    negatives = logits.masked_fill(~pairs.negative, nothing).logsumexp(dim=-1)
    positives = logits.masked_fill(~pairs.positive, nothing).logsumexp(dim=-1)
    return negatives - positives


def _terms(contrast: Tensor, rows: Tensor, anchor: Tensor) -> Tensor:
    """softplus(L_i) at anchors, 0 elsewhere, [m, k]."""
    # Not F.softplus, which returns x itself above 20: 2e-9 off in float64.
    softplus = -F.logsigmoid(-contrast)
    # 0, but NaN for a row that is not finite: one alone in its chunk would otherwise pass as a 0.
    doubt = rows.detach().abs().amax(dim=-1) * 0.0
    return torch.where(anchor, softplus + doubt, 0.0)


def _log_count(count: Tensor) -> Tensor:
    """log(count), and 0 for an empty group, whose sum decides the term by itself."""
    return count.clamp(min=1.0).log()


def _count_correction(tokens: ChunkedTokens, pairs: _Pairs, num_sequences: int, self_positive: str) -> Tensor:
    """log(N_i in the sequence / N_i in the chunk) - log(P_i in the sequence / P_i in the chunk), [m, k]."""
    # Invalid tokens share the label -1, which no valid token has.
    labels = by_sequence(torch.where(tokens.valid, tokens.labels, -1), num_sequences)
    ordered = labels.sort(dim=-1).values
    same = torch.searchsorted(ordered, labels, right=True) - torch.searchsorted(ordered, labels)
    num_valid = by_sequence(tokens.valid, num_sequences).sum(dim=-1, keepdim=True)
    different = (num_valid - same).reshape_as(tokens.labels).to(tokens.rows.dtype)
    same = same.reshape_as(tokens.labels).to(tokens.rows.dtype)
    if self_positive != "always":
        same = same - 1.0  # a token alone in its sequence has 0, and _log_count then counts the token itself
    more_negatives = _log_count(different) - _log_count(pairs.num_negative)
    more_positives = _log_count(same) - _log_count(pairs.num_positive)
    return more_negatives - more_positives


def _chunk_weights(kind: str, pairs: _Pairs, num_sequences: int) -> Tensor:
    """One factor per chunk, [m, 1]: sum(terms) / anchors of a sequence is the weighted mean of chunks."""
    anchors = by_sequence(pairs.anchor.sum(dim=-1).to(pairs.num_positive.dtype), num_sequences)
    positive = by_sequence(pairs.num_positive.sum(dim=-1), num_sequences)
    negative = by_sequence(pairs.num_negative.sum(dim=-1), num_sequences)
    if kind == "uniform":
        share = (anchors > 0).to(anchors.dtype)
    else:
        ratio = positive / negative if kind == "pos-neg-ratio" else negative / positive
        share = torch.where((positive > 0) & (negative > 0), ratio, 0.0)
    total = share.sum(dim=-1, keepdim=True)
    share = share / torch.where(total > 0, total, 1.0)
    weight = share * anchors.sum(dim=-1, keepdim=True) / anchors.clamp(min=1.0)
    return weight.reshape(-1, 1)
