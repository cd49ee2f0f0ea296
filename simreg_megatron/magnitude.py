# SPDX-License-Identifier: Apache-2.0
"""Diagnostics of the lengths of hidden states, which no cosine sees (arXiv 2602.09229).

Sums and counts, never means, as in `geometry`: they add up over micro-batches and ranks, and one place divides.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

AT_ONCE = {"cpu": 64 << 20, "cuda": 512 << 20}
"""Bytes that a measure of rows may take in log steps: enough for the micro-batches of our presets at once."""


def row_norms(rows: Tensor) -> Tensor:
    """|row| of [..., d] in float64: [...].

    A part at a time, for torch's norms in a wider type first make a copy of all rows in it, which for the hidden states
    of a long sequence is more than the term itself takes.
    """
    if rows.dim() < 2 or not rows.numel():
        return torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
    dim = max(range(rows.dim() - 1), key=lambda place: rows.shape[place])
    at_once = AT_ONCE.get(rows.device.type, AT_ONCE["cuda"])
    step = max(1, at_once // (16 * (rows.numel() // rows.shape[dim])))  # 16 bytes a number: two copies in float64
    parts = [torch.linalg.vector_norm(part, dim=-1, dtype=torch.float64) for part in rows.split(step, dim)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class NormSums(NamedTuple):
    """Sums over the norms of a set of tokens, or [...] of several sets: float64 on the device of the embeddings."""

    number: Tensor
    total: Tensor
    squares: Tensor


@torch.no_grad()
def norm_table(embeddings: Tensor, weights: Tensor) -> Tensor:
    """Sums over 1, |e_i| and |e_i|^2, each times the weight of its token: a NormSums as a tensor [..., 3].

    Args:
        embeddings: [n..., d]; norms are taken in float64. A token of weight 0 may hold anything.
        weights: bool or numbers [..., n...]: whether, or how often, a token counts.
    """
    norms = row_norms(embeddings.detach())
    tokens = tuple(range(-norms.dim(), 0))
    norms, weights = norms.masked_fill(weights == 0, 0.0), weights.double()
    totals = weights * norms
    return torch.stack([weights, totals, totals * norms], dim=-1).sum(dim=tuple(place - 1 for place in tokens))


def mean_norm(sums: NormSums) -> Tensor:
    """Mean; NaN where nothing was counted."""
    return sums.total / sums.number


def coefficient_of_variation(sums: NormSums) -> Tensor:
    """CV = std / mean, with the standard deviation of the whole population: at least 0.1 says something, below 0.05 is
    noise by the source."""
    mean = mean_norm(sums)
    return (sums.squares / sums.number - mean.square()).clamp(min=0).sqrt() / mean


def cohens_d(one: NormSums, other: NormSums) -> Tensor:
    """d = (mean_1 - mean_2) / s, s^2 = ((n_1 - 1) s_1^2 + (n_2 - 1) s_2^2) / (n_1 + n_2 - 2), s_1 and s_2 unbiased.

    How far the norms of two groups of tokens lie apart: below 0.2 negligible, from 0.8 large. Which standard deviation
    the source pools it does not say; unbiased is our choice.
    """
    spread = sum(group.squares - group.total.square() / group.number for group in (one, other))
    return (mean_norm(one) - mean_norm(other)) / (spread / (one.number + other.number - 2)).sqrt()
