# SPDX-License-Identifier: Apache-2.0
"""SimCSE: a baseline on whole sequences, which does not look at labels.

Shapes: b sequences, n tokens, d features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from simreg_megatron.losses._anchored import check_temperature
from simreg_megatron.losses._chunks import check_tokens, no_autocast, usable_tokens
from simreg_megatron.losses.similarity import unit_rows


def simcse_loss(
    embeddings: Tensor,
    *,
    temperature: float = 0.05,
    valid: Tensor | None = None,
) -> Tensor:
    """L = mean_i -log( exp(cos(h_i, g_i) / tau) / sum_j exp(cos(h_i, g_j) / tau) ).

    h_i and g_i are the means of the hidden states of the first and of the second half of sequence i.

    Args:
        embeddings: [b, n, d]; at least two sequences, else the loss is 0.
        temperature: tau, above 0.
        valid: bool [b, n]; a sequence needs a valid token in each half to take part.

    Raises:
        ValueError: an argument is out of range, or shapes, types or devices do not fit.

    Source: our adaptation of Gao et al. 2021 to pretraining. Theirs are two passes with other dropout; pretraining has
    none, so halves of the sequence in their place are our choice, as is comparing inside the micro-batch only.
    """
    check_temperature("temperature", temperature)
    labels = torch.zeros(embeddings.shape[:-1], dtype=torch.long, device=embeddings.device)
    check_tokens(embeddings, labels, valid, None, 0)
    usable = usable_tokens(embeddings, labels, valid)
    in_second = torch.arange(embeddings.shape[1], device=embeddings.device) >= (embeddings.shape[1] + 1) // 2
    losses, takes_part = sequence_losses(*half_sums(embeddings, usable, in_second), temperature)
    return losses.sum() / takes_part.sum().clamp(min=1)


def half_sums(embeddings: Tensor, usable: Tensor, in_second: Tensor) -> tuple[Tensor, Tensor]:
    """Sums [b, 2, d] and counts [b, 2] of the usable tokens of each half; parts of a sequence add up.

    Args:
        in_second: bool [n], which tokens lie in the second half.
    """
    members = torch.stack([usable & ~in_second, usable & in_second], dim=1)
    rows = embeddings if embeddings.dtype == torch.float64 else embeddings.float()
    rows = torch.where(usable.unsqueeze(-1), rows, 0.0)
    with no_autocast(embeddings.device.type):
        return members.to(rows.dtype) @ rows, members.sum(dim=-1)


def sequence_losses(sums: Tensor, counts: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Losses [b], 0 where a sequence does not take part, and which do: bool [b]."""
    takes_part = (counts > 0).all(dim=-1) & (sums.detach() != 0).any(dim=-1).all(dim=-1)
    means = torch.where(takes_part[:, None, None], sums / counts.clamp(min=1).unsqueeze(-1), 1.0)
    with no_autocast(sums.device.type):
        first, second = unit_rows(means).unbind(dim=1)
        logits = (first @ second.mT / temperature).masked_fill(~takes_part, torch.finfo(sums.dtype).min / 4)
    losses = F.cross_entropy(logits, torch.arange(len(logits), device=logits.device), reduction="none")
    return torch.where(takes_part, losses, 0.0), takes_part
