# SPDX-License-Identifier: Apache-2.0
"""Token roles, decided by the labels alone: whether a token has a term, its offset, and its weight.

    term_i = weight_i * softplus( LSE_{N_i} - LSE_{P_i} + offset_i )

Labels are cheap to bring from other ranks, hidden states are not: so a rank that holds a part of a sequence computes
these for the whole of it. All O(n log n), by sorting; nothing is read on the host.

Shapes: b sequences, n tokens, c chunks of k tokens in each sequence, m = b * c.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from simreg_megatron.losses._chunks import NO_LABEL, by_sequence, chunk_length, fold, unfold

_Tokens = tuple[Tensor, Tensor, Tensor | None]  # labels, usable, documents, each [b, n]


class TokenRoles(NamedTuple):
    """Per token [b, n]."""

    anchor: Tensor  # bool: has a term
    offset: Tensor | None  # added to the contrast; None is 0
    weight: Tensor | None  # factor of the term; None is 1

    def cut(self, first: int, last: int) -> TokenRoles:
        """Return the roles of the tokens first:last."""
        own = slice(first, last)
        offset, weight = (None if part is None else part[:, own] for part in (self.offset, self.weight))
        return TokenRoles(self.anchor[:, own], offset, weight)


def token_roles(
    labels: Tensor,
    usable: Tensor,
    *,
    documents: Tensor | None = None,
    chunk_size: int = 0,
    group_reduce: str = "sum",
    self_positive: str = "always",
    chunk_weight: str = "token",
    dtype: torch.dtype = torch.float32,
) -> TokenRoles:
    """Find the roles of all tokens of whole sequences (if chunk_weight is "token": of any whole chunks).

    Args:
        labels: integer [b, n].
        usable: bool [b, n]; other tokens are neither anchor, positive nor negative.
        documents: integer [b, n] or None; tokens of different documents never meet.
        chunk_size, group_reduce, self_positive, chunk_weight: as in `simreg_loss`.
        dtype: of offset and weight.
    """
    if (group_reduce, self_positive, chunk_weight) == ("sum", "always", "token"):
        return TokenRoles(usable, None, None)  # nothing to count
    num_sequences, num_tokens = labels.shape
    length = chunk_length(num_tokens, chunk_size)
    tokens = labels, usable, documents
    chunks = _Counts.of(tokens, length, self_positive, dtype)
    offset = weight = None
    if group_reduce == "mean":
        offset = _log(chunks.positive) - _log(chunks.negative)
    elif chunk_weight == "count-corrected":
        offset = _count_correction(chunks, tokens, length, self_positive, dtype)
    if chunk_weight in ("uniform", "pos-neg-ratio", "neg-pos-ratio"):
        weight = _chunk_weights(chunk_weight, chunks, num_sequences)
    offset, weight = (None if part is None else unfold(part, num_sequences, num_tokens) for part in (offset, weight))
    return TokenRoles(unfold(chunks.anchor, num_sequences, num_tokens), offset, weight)


def pair_counts(
    labels: Tensor, usable: Tensor, *, documents: Tensor | None = None, chunk_size: int = 0
) -> tuple[Tensor, Tensor]:
    """Count the other tokens of its label, and of other labels, that each token meets: two float64 [b, n], 0 for
    unusable tokens; arguments as in `token_roles`."""
    num_sequences, num_tokens = labels.shape
    length = chunk_length(num_tokens, chunk_size)
    chunks = _Counts.of((labels, usable, documents), length, "always", torch.float64)
    same, different = (unfold(count, num_sequences, num_tokens) for count in (chunks.positive, chunks.negative))
    return same - usable.double(), different


class _Counts(NamedTuple):
    """Counts of the tokens of its row that each token meets, [rows, length]."""

    anchor: Tensor  # bool
    positive: Tensor
    negative: Tensor  # 0 for a token that is no anchor

    @classmethod
    def of(cls, tokens: _Tokens, length: int, self_positive: str, dtype: torch.dtype) -> _Counts:
        """Count in rows of `length` tokens."""
        labels, usable, documents = tokens
        ids = fold(label_ids(labels, usable, documents), length, NO_LABEL)
        anchor = ids != NO_LABEL
        same = _occurrences(ids)
        meets = anchor.sum(dim=-1, keepdim=True)
        if documents is not None:
            meets = _occurrences(fold(torch.where(usable, documents, NO_LABEL), length, NO_LABEL))
        positive = same
        if self_positive == "never":
            anchor, positive = anchor & (same > 1), same - 1
        elif self_positive == "only_if_alone":
            positive = torch.where(same > 1, same - 1, same)
        return cls(anchor, (positive * anchor).to(dtype), ((meets - same) * anchor).to(dtype))


def label_ids(labels: Tensor, usable: Tensor, documents: Tensor | None) -> Tensor:
    """Return one number for each (document, label); NO_LABEL for tokens left out."""
    ids = labels.long()
    if documents is not None:
        ids = ids + (documents.long() << 32)  # token ids stay far below 2^32
    return torch.where(usable, ids, NO_LABEL)


def _occurrences(values: Tensor) -> Tensor:
    """Count how often each value [r, k] occurs in its row."""
    values = values.contiguous()
    ordered = values.sort(dim=-1).values
    return torch.searchsorted(ordered, values, right=True) - torch.searchsorted(ordered, values)


def _log(count: Tensor) -> Tensor:
    """Return log(count), and 0 for an empty group, whose (empty) sum decides the term."""
    return count.clamp(min=1.0).log()


def _count_correction(chunks: _Counts, tokens: _Tokens, length: int, self_positive: str, dtype: torch.dtype) -> Tensor:
    """log(N_i in the sequence / N_i in the chunk) - log(P_i in the sequence / P_i in the chunk), [m, k]."""
    whole = _Counts.of(tokens, chunk_length(tokens[0].shape[1], 0), self_positive, dtype)
    negative, positive = fold(whole.negative, length, 0.0), fold(whole.positive, length, 0.0)
    return (_log(negative) - _log(chunks.negative)) - (_log(positive) - _log(chunks.positive))


def _chunk_weights(kind: str, chunks: _Counts, num_sequences: int) -> Tensor:
    """Compute one factor per chunk, spread over its tokens [m, k]: sum(terms) / anchors is their weighted mean."""
    anchors = by_sequence(chunks.anchor.sum(dim=-1).to(chunks.positive.dtype), num_sequences)
    positive = by_sequence(chunks.positive.sum(dim=-1), num_sequences)
    negative = by_sequence(chunks.negative.sum(dim=-1), num_sequences)
    if kind == "uniform":
        share = (anchors > 0).to(anchors.dtype)
    else:
        ratio = positive / negative if kind == "pos-neg-ratio" else negative / positive
        share = torch.where((positive > 0) & (negative > 0), ratio, 0.0)
    total = share.sum(dim=-1, keepdim=True)
    share = share / torch.where(total > 0, total, 1.0)
    weight = share * anchors.sum(dim=-1, keepdim=True) / anchors.clamp(min=1.0)
    return weight.reshape(-1, 1).expand_as(chunks.anchor)
