# SPDX-License-Identifier: Apache-2.0
"""Changes that make a single process comparable with many.

Without --calculate-per-token-loss Megatron divides by the valid tokens N_r of each of R ranks and averages the ranks,
so its loss depends on the layout. `data_ranks` and `context_ranks` give one process that function: the gradient of the
per-token loss is multiplied by N / (R * N_r) before Megatron divides it by N.
"""

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
    from simreg_megatron.parallel import metrics

    metrics._SAMPLED_TOKENS = metrics._PREDICTED_TOKENS = 60


def padded_samples() -> None:
    """Samples of a packed row are padded as for four context ranks, so that rows are the same in all layouts."""
    from megatron.training.datasets.sft_dataset import SFTDataset

    read = SFTDataset.__getitem__

    def padded(dataset: Any, index: int) -> Any:
        dataset.config.context_parallel_size = 4
        return read(dataset, index)

    SFTDataset.__getitem__ = padded


def data_ranks() -> None:
    """Row b of the batch belongs to data-parallel rank b // (rows / 2)."""
    _average_ranks(lambda mask, _: torch.arange(mask.shape[0])[:, None].expand_as(mask) * _RANKS // mask.shape[0])


def context_ranks() -> None:
    """Four blocks of the sequence belong to the context-parallel ranks 0, 1, 1, 0 (zigzag)."""

    _average_ranks(lambda mask, _: _zigzag(mask.shape[1]).expand_as(mask))


def context_ranks_of_samples() -> None:
    """The same in each sample of a packed row."""
    padded_samples()

    def owner(mask: Tensor, packing: Any) -> Tensor:
        return torch.cat([_zigzag(length) for length in packing.cu_seqlens_q.diff().tolist()]).expand_as(mask)

    _average_ranks(owner)


def _zigzag(length: int) -> Tensor:
    block = torch.arange(length) * 2 * _RANKS // length
    return torch.minimum(block, 2 * _RANKS - 1 - block)


def _average_ranks(owner: Callable[[Tensor, Any], Tensor]) -> None:
    from megatron.core.models.gpt.gpt_model import GPTModel

    forward = GPTModel.forward

    def averaged(model: Any, *args: Any, loss_mask: Tensor, **kwargs: Any) -> Tensor:
        loss = forward(model, *args, loss_mask=loss_mask, **kwargs)
        mask, owners = loss_mask.float(), owner(loss_mask, kwargs.get("packed_seq_params"))
        counts = torch.stack([(mask * (owners == rank)).sum() for rank in range(_RANKS)])
        return _WeighGradient.apply(loss, mask.sum() / (_RANKS * counts[owners].clamp(min=1)))

    GPTModel.forward = averaged
