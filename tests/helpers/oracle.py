# SPDX-License-Identifier: Apache-2.0
"""SimReg as a naive double loop over pairs, in float64, straight from the definition of the term, with autograd.

Nothing is shared with the package. It overflows below a temperature of about 0.0015.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def _cosine(a: Tensor, k: Tensor) -> Tensor:
    return a @ k / (a.norm() * k.norm())


_SIMILARITY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cosine": _cosine,
    "dot": lambda a, k: a @ k,
    "qnorm": lambda a, k: a @ k / a.norm(),
    "dnorm": lambda a, k: a @ k / k.norm(),
}


def naive_simreg(
    embeddings: Tensor,
    labels: Tensor,
    *,
    temperature: float,
    valid: Tensor | None = None,
    chunk_size: int = 0,
    similarity: str = "cosine",
    group_reduce: str = "sum",
    self_positive: str = "always",
    chunk_weight: str = "token",
) -> tuple[Tensor, int]:
    """Terms [b, n] in float64 and the number of anchors, of embeddings [b, n, d] and labels [b, n]."""
    num_sequences, num_tokens = labels.shape
    rows = embeddings.double()
    terms = torch.zeros(num_sequences, num_tokens, dtype=torch.float64)
    num_anchors = 0
    for b in range(num_sequences):
        names = [int(y) for y in labels[b]]
        counts = torch.ones(num_tokens, dtype=torch.bool) if valid is None else valid[b]
        sequence = [i for i, y in enumerate(names) if y >= 0 and counts[i] and rows[b, i].any()]
        size = chunk_size or num_tokens
        chunks = [[i for i in sequence if start <= i < start + size] for start in range(0, num_tokens, size)]
        found, anchors, ratios = {}, [], []
        for chunk in chunks:
            chunk_terms, num_pos, num_neg = {}, 0, 0
            for i in chunk:
                positives = _positives(i, chunk, names, self_positive)
                negatives = [j for j in chunk if names[j] != names[i]]
                if not positives:
                    continue
                num_pos, num_neg = num_pos + len(positives), num_neg + len(negatives)
                odds = _odds(rows[b], i, positives, negatives, _SIMILARITY[similarity], temperature)
                if group_reduce == "mean" and negatives:
                    odds = odds * len(positives) / len(negatives)
                if chunk_weight == "count-corrected" and negatives:
                    all_positives = _positives(i, sequence, names, self_positive)
                    all_negatives = [j for j in sequence if names[j] != names[i]]
                    odds = odds * len(all_negatives) / len(negatives) * len(positives) / len(all_positives)
                chunk_terms[i] = torch.log1p(odds)
            found |= chunk_terms
            anchors.append(list(chunk_terms))
            ratios.append(num_pos / num_neg if num_pos and num_neg else math.nan)
        num_anchors += len(found)
        for chunk_anchors, weight in zip(anchors, _weights(chunk_weight, anchors, ratios), strict=True):
            for i in chunk_anchors:
                terms[b, i] = found[i] * weight
    return terms, num_anchors


def _positives(i: int, others: Sequence[int], names: Sequence[int], self_positive: str) -> list[int]:
    positives = [j for j in others if names[j] == names[i]]
    without_self = [j for j in positives if j != i]
    if self_positive == "never":
        return without_self
    return without_self if without_self and self_positive == "only_if_alone" else positives


def _odds(
    rows: Tensor,
    i: int,
    positives: Sequence[int],
    negatives: Sequence[int],
    similarity: Callable[[Tensor, Tensor], Tensor],
    temperature: float,
) -> Tensor:
    """exp(L_i): the sum over negatives over the sum over positives."""
    zero = torch.zeros((), dtype=torch.float64)
    above = sum((torch.exp(similarity(rows[i], rows[j]) / temperature) for j in negatives), zero)
    below = sum((torch.exp(similarity(rows[i], rows[j]) / temperature) for j in positives), zero)
    return above / below


def _weights(kind: str, anchors: Sequence[Sequence[int]], ratios: Sequence[float]) -> list[float]:
    """The factor of every term of a chunk, one per chunk."""
    if kind in ("token", "count-corrected"):
        return [1.0] * len(anchors)
    if kind == "uniform":
        raw = [1.0 if a else 0.0 for a in anchors]
    else:
        raw = [0.0 if math.isnan(r) else (r if kind == "pos-neg-ratio" else 1 / r) for r in ratios]
    total, count = sum(raw), sum(len(a) for a in anchors)
    return [w / total * count / len(a) if a and total else 0.0 for w, a in zip(raw, anchors, strict=True)]
