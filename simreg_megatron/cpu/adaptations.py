# SPDX-License-Identifier: Apache-2.0
"""The places of Megatron that assume more of a GPU than a device's name."""

from __future__ import annotations

import copy
import functools
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock


def adapt_megatron() -> None:
    """Make these places work on the CPU; imports Megatron."""
    import megatron.core.datasets.utils as dataset_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
    import megatron.core.utils as core_utils
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from simreg_megatron.cpu import attention as cpu_attention
    from simreg_megatron.cpu.installed import without_make

    build = functools.partial(_build_for_this_python, dataset_utils.compile_helpers)
    dataset_utils.compile_helpers = without_make(build)
    token_dispatcher.maybe_move_tensor_to_cpu = _split_sizes_to_host
    _allow_sequence_parallelism(WrappedTorchNorm)
    _gather_tensors_of_unequal_sizes()
    cpu_attention.adapt(DotProductAttention)
    core_utils.tex = SimpleNamespace(thd_get_partitioned_indices=_rows_of_a_rank)


def _rows_of_a_rank(cu_seqlens: Any, length: int, size: int, rank: int) -> Any:
    """Cut packed rows over context ranks, as Transformer Engine's kernel does."""
    from simreg_megatron.cpu.attention import zigzag_positions

    return zigzag_positions(length, size, cu_seqlens)[rank]


def _build_for_this_python(build: Callable[[], None]) -> None:
    """Build with this Python: the Makefile takes the first python3 and python3-config on the PATH, maybe others."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    try:
        with mock.patch.dict(os.environ, PATH=path, MAKEFLAGS=f"-- LIBEXT={sysconfig.get_config_var('EXT_SUFFIX')}"):
            build()
    except SystemExit:
        sys.exit(
            "error: Megatron could not build its dataset helpers (see what make says above): megatron/core/datasets/"
            "helpers.cpp needs make, g++ and `pip install pybind11`"
        )


def _split_sizes_to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Convert the split sizes of an all-to-all to numbers; Megatron does so only for tensors on a GPU."""
    return tensor.numpy() if as_numpy and hasattr(tensor, "numpy") else tensor


def _allow_sequence_parallelism(norm_class: Any) -> None:
    """Allow torch's norms on a shard: they are right there, if their weights' gradients are marked to be summed."""
    make = norm_class.__new__

    def make_marked(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        unsharded = copy.copy(config)
        unsharded.sequence_parallel = False  # upstream refuses it, for want of the mark set below
        norm = make(cls, unsharded, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    norm_class.__new__ = make_marked


def _gather_tensors_of_unequal_sizes() -> None:
    """Gather as NCCL does, on which the layer-wise optimizer relies; gloo refuses, so each rank broadcasts its own."""
    import torch.distributed as dist

    all_gather = dist.all_gather

    def gathered(tensors: list[Any], tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        if len({part.shape for part in tensors}) == 1:
            return all_gather(tensors, tensor, group, async_op)
        ranks = dist.get_process_group_ranks(group)
        for rank, part in zip(ranks, tensors, strict=True):
            if rank == dist.get_rank():
                part.copy_(tensor)
            if part.numel():
                dist.broadcast(part, rank, group)
        return SimpleNamespace(wait=lambda: None) if async_op else None

    dist.all_gather = gathered  # type: ignore[assignment]
