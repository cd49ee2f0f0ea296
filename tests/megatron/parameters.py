# SPDX-License-Identifier: Apache-2.0
"""A rank's parameters and gradients under names that every layout shares, and which part of each the rank holds."""

import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from simreg_megatron.plugin import compat
from tests.versions import tiny

Shard = tiny.Shard
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")


def named_parameters(model_chunks: list[Any]) -> Iterator[tuple[str, Any]]:
    """(name, parameter) of this stage, counted over the whole model; tied embeddings go by their original's name."""
    for chunk in compat.unwrapped(model_chunks):
        for name, parameter in tiny.named_parameters([chunk]):
            if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
                name = "embedding.word_embeddings.weight"
            yield _with_global_expert(name, chunk.config), parameter


def _with_global_expert(name: str, config: Any) -> str:
    from megatron.core import parallel_state

    def number(local: re.Match[str]) -> str:
        experts_here = config.num_moe_experts // config.expert_model_parallel_size
        return str(parallel_state.get_expert_model_parallel_rank() * experts_here + int(local[0]))

    return _EXPERT.sub(number, name)


def shard_of(name: str, parameter: Any) -> Shard:
    """The part of the parameter that this rank holds under tensor or expert-tensor parallelism."""
    from megatron.core import parallel_state

    if not getattr(parameter, "tensor_model_parallel", False):
        return -1, 0, 1
    group = parallel_state.get_tensor_model_parallel_group()
    if _EXPERT.search(name):
        group = parallel_state.get_expert_tensor_parallel_group()
    return (parameter.partition_dim, group.rank(), group.size()) if group.size() > 1 else (-1, 0, 1)


def gradients(model_chunks: list[Any]) -> dict[str, Tensor]:
    """Every parameter's gradient as `finalize_model_grads` left it, without the fp16 loss scale.

    Parts that an optimizer or FSDP spread over ranks are gathered: all ranks call it.
    """
    from megatron.core.utils import get_model_config

    found: dict[Any, Tensor] = {}
    for chunk in model_chunks:
        if chunk.ddp_config.use_megatron_fsdp:
            buffer = chunk.module.param_and_grad_buffer
            grads = buffer.dist_main_grad  # a parameter of which this rank has no element has none of its own
            found |= {parameter: whole_of(grads[name]) for name, parameter in buffer.optimizer_named_parameters}
            continue
        if isinstance(next(chunk.parameters()), DTensor):  # FSDP2, which has no buffers
            found |= {parameter: whole_of(parameter.grad) for parameter in chunk.parameters()}
            continue
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            scattered = chunk.ddp_config.use_distributed_optimizer
            whole = _gathered(buffer) if scattered else buffer.grad_data
            for parameter, (first, last, _) in buffer.param_index_map.items():
                found[parameter] = whole[first:last].view(parameter.shape)
    scale_loss = get_model_config(model_chunks[0]).grad_scale_func
    scale = float(scale_loss(torch.tensor(1.0))) if scale_loss else 1.0
    return {name: found[parameter].float() / scale for name, parameter in named_parameters(model_chunks)}


def whole_of(tensor: Tensor) -> Tensor:
    """All of a tensor of which FSDP leaves each rank a part: torch whole rows, Megatron any elements. A collective."""
    from megatron.core import parallel_state

    if not isinstance(tensor, DTensor):
        return tensor
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    parts: list[Any] = [None] * group.size()
    dist.all_gather_object(parts, tensor.to_local().flatten(), group=group)
    return torch.cat(parts).view(tensor.shape)


def _gathered(buffer: Any) -> Tensor:
    """The buffer's gradients with every rank's reduced part in its place."""
    group, whole = buffer.data_parallel_group, buffer.grad_data.clone()
    for bucket in buffer.buckets:
        part = bucket.grad_data.numel() // group.size()
        own = bucket.grad_data[group.rank() * part : (group.rank() + 1) * part]
        dist.all_gather_into_tensor(whole[bucket.offset : bucket.offset + group.size() * part], own, group=group)
    return whole
