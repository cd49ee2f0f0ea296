# SPDX-License-Identifier: Apache-2.0
"""Ways to compute the same loss, and the hidden states they are given."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from simreg_megatron.losses import simreg_loss

Loss = Callable[[Tensor, Tensor], Tensor]  # embeddings [b, n, d], labels [b, n]


def hidden_states(batch: int, length: int, width: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Clusters around a common direction, as in a trained model: cosines near 0.6 between labels, 0.9 within one."""
    generator = torch.Generator().manual_seed(0)
    labels = (torch.rand(batch, length, generator=generator) ** 3 * 1000).long()  # few labels are frequent
    centres = torch.randn(1000, width, generator=generator) + 1.2
    rows = centres[labels] + 0.4 * torch.randn(batch, length, width, generator=generator)
    return rows.to(device, dtype), labels.to(device)


def dense(embeddings: Tensor, labels: Tensor) -> Tensor:
    """The equation as one would write it first: a matrix of all pairs, two log-sums, autograd. In float32."""
    unit = F.normalize(embeddings.float(), dim=-1)
    logits = unit @ unit.mT / 0.01
    same = labels.unsqueeze(-1) == labels.unsqueeze(-2)
    positives = logits.masked_fill(~same, -torch.inf).logsumexp(dim=-1)
    negatives = logits.masked_fill(same, -torch.inf).logsumexp(dim=-1)
    return F.softplus(negatives - positives).mean()


def sup_con(embeddings: Tensor, labels: Tensor) -> Tensor:
    """The nearest loss of pytorch-metric-learning, sequence by sequence."""
    from pytorch_metric_learning.losses import SupConLoss

    loss = SupConLoss(temperature=0.01)
    return torch.stack([loss(rows.float(), ids) for rows, ids in zip(embeddings, labels, strict=True)]).mean()


LOSSES: dict[str, Loss] = {
    "dense": dense,
    "reference": partial(simreg_loss, impl="reference"),
    "tiled": partial(simreg_loss, impl="tiled"),
    "SupConLoss": sup_con,
}
