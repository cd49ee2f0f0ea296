# SPDX-License-Identifier: Apache-2.0
"""What a process must be told to be comparable.

`data_ranks` and `context_ranks` let one process average as Megatron's default mode does over many: a mean of every
rank's own mean. Without --calculate-per-token-loss Megatron divides by the valid tokens N_r of each rank r and then
averages the R ranks, so with unequal counts its own loss depends on the layout. The patches give one process that same
function: the per-token loss keeps its value, and its gradient is multiplied by N / (R * N_r) before Megatron divides
it by N.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_RANKS = 2


class _WeighGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(weights)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (weights,) = ctx.saved_tensors
        return grads[0] * weights, None


def few_samples() -> None:
    """The log's samples are so small that they take every third position of these micro-batches of 128 tokens."""
    from simreg_megatron.measures import metrics

    metrics._SAMPLED_TOKENS = metrics._PREDICTED_TOKENS = 60


def data_ranks() -> None:
    """Row b of the batch belongs to data-parallel rank b // (rows / 2)."""
    _average_ranks(lambda mask: torch.arange(mask.shape[0])[:, None].expand_as(mask) * _RANKS // mask.shape[0])


def context_ranks() -> None:
    """Four blocks of the sequence belong to the context-parallel ranks 0, 1, 1, 0 (zigzag)."""

    def owner(mask: Tensor) -> Tensor:
        block = torch.arange(mask.shape[1]) * 2 * _RANKS // mask.shape[1]
        return torch.minimum(block, 2 * _RANKS - 1 - block).expand_as(mask)

    _average_ranks(owner)


def _average_ranks(owner: Callable[[Tensor], Tensor]) -> None:
    from megatron.core.models.gpt.gpt_model import GPTModel

    forward = GPTModel.forward

    def averaged(model: Any, *args: Any, loss_mask: Tensor, **kwargs: Any) -> Tensor:
        loss = forward(model, *args, loss_mask=loss_mask, **kwargs)
        mask, owners = loss_mask.float(), owner(loss_mask)
        counts = torch.stack([(mask * (owners == rank)).sum() for rank in range(_RANKS)])
        return _WeighGradient.apply(loss, mask.sum() / (_RANKS * counts[owners].clamp(min=1)))

    GPTModel.forward = averaged
