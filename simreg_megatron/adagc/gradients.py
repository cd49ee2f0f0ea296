# SPDX-License-Identifier: Apache-2.0
"""The parameters that Megatron trains, under one name in every layout, and the gradients that its optimizers step on.

Megatron numbers layers and experts from 0 on every rank; here layers are counted over all pipeline stages and experts
over all expert-parallel ranks. Tensor-parallel shards of a parameter share its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor

_LAYER = re.compile(r"(?:^|\.)layers\.\d+$")
_SEQUENTIAL_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")
_GROUPED_EXPERT = re.compile(r"(?<=\.experts\.)(linear_fc[12]\.(?:weight|bias))(\d+)$")
_ALL_EXPERTS = re.compile(r"\.experts\.(?:weight[12]|linear_fc[12]\.(?:weight|bias))$")
_CUT_UNMARKED = re.compile(r"\.softmax_offset$|\.experts\.linear_fc1\.bias\d+$")  # the latter up to 0.18
_EMBEDDING = "embedding.word_embeddings.weight"
_ELSEWHERE = (
    "use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp", "optimizer_cpu_offload", "optimizer_cuda_graph",
)  # fmt: skip
_flat = chain.from_iterable
# Lists of lists, an inner one for each parameter group: the model's parameters, and what is stepped on in their place.
_OF_SHARDS = (  # DistributedOptimizer
    "model_float16_groups", "shard_float16_groups", "shard_fp32_from_float16_groups", "model_fp32_groups",
    "shard_fp32_groups",
)  # fmt: skip
# Float16OptimizerWithFloat16Params
_OF_COPIES = ("float16_groups", "fp32_from_float16_groups", "fp32_from_fp32_groups")


class ModelParameter(NamedTuple):
    name: str
    parameter: Any
    is_counted: bool  # its gradient counts in sums over all ranks: it is no replica over tensor parallelism, no copy
    whole: int  # elements of the parameter, over all tensor-parallel ranks


class MainParameter(NamedTuple):
    """A tensor that an optimizer steps on: a parameter, its float32 copy, or this rank's piece of one."""

    tensor: Any
    parameter: Any  # the model's
    is_counted: bool  # its gradient counts in sums over all ranks: no other data-parallel rank counts the same


def model_parameters(models: list[Any]) -> Iterator[ModelParameter]:
    """List the trained parameters of this rank's pipeline stages, given without Megatron's wrappers."""
    for model in models:
        layers = {
            name + ".": f"{name.rpartition('.')[0]}.{module.layer_number - 1}."
            for name, module in model.named_modules()
            if _LAYER.search(name) and hasattr(module, "layer_number")
        }
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            is_copy = bool(getattr(parameter, "shared", False))
            if is_copy:  # of tied embeddings, on the last pipeline stage or on that of a further prediction
                name = _EMBEDDING
            local = next(filter(name.startswith, layers), "")
            name = _counted_experts(layers.get(local, "") + name.removeprefix(local), model.config)
            if getattr(parameter, "is_gtp_weight_remat", False):  # from 0.19 on
                raise NotImplementedError(
                    f"--adagc does not know how --tensor-parallel-num-weight-shards cuts {name}: drop one of them"
                )
            rank, size = _tensor_rank_and_size(parameter)
            is_cut = bool(getattr(parameter, "tensor_model_parallel", False) or _CUT_UNMARKED.search(name))
            is_counted = not is_copy and (is_cut or rank == 0)
            yield ModelParameter(name, parameter, is_counted, int(parameter.numel()) * (size if is_cut else 1))


def _tensor_rank_and_size(parameter: Any) -> tuple[int, int]:
    """Return this rank's number, and the number of ranks, over which tensor parallelism may cut this parameter."""
    from megatron.core import parallel_state as groups

    if not getattr(parameter, "allreduce", True):  # an expert's
        return groups.get_expert_tensor_parallel_rank(), groups.get_expert_tensor_parallel_world_size()
    return groups.get_tensor_model_parallel_rank(), groups.get_tensor_model_parallel_world_size()


def _counted_experts(name: str, config: Any) -> str:
    """Return the name with the expert's number over all expert-parallel ranks."""
    from megatron.core import parallel_state

    if _ALL_EXPERTS.search(name):
        raise NotImplementedError(
            f"--adagc clips each expert separately, and {name} holds all of a rank's experts in one tensor: "
            "train with Transformer Engine's grouped experts or without --moe-grouped-gemm, or drop --adagc"
        )
    if not (_SEQUENTIAL_EXPERT.search(name) or _GROUPED_EXPERT.search(name)):
        return name
    experts_here = config.num_moe_experts // config.expert_model_parallel_size
    first = parallel_state.get_expert_model_parallel_rank() * experts_here
    name = _SEQUENTIAL_EXPERT.sub(lambda match: str(first + int(match[0])), name)
    return _GROUPED_EXPERT.sub(lambda match: f"{match[1]}{first + int(match[2])}", name)


def refuse_hidden(args: Any) -> None:
    """Refuse settings under which gradients cannot be reached between unscaling and step."""
    for flag in _ELSEWHERE:
        if getattr(args, flag, False):
            raise NotImplementedError(
                f"--adagc does not know where --{flag.replace('_', '-')} keeps the gradients: drop one of them"
            )


def single_optimizers(optimizer: Any, owns: bool = False) -> Iterator[tuple[Any, bool]]:
    """List the optimizers of a chain, and of chains in it; owns: no other data-parallel rank steps on the same."""
    if not hasattr(optimizer, "chained_optimizers"):
        yield optimizer, owns
        return
    if type(optimizer).__name__ == "LayerWiseDistributedOptimizer":  # one dense replica alone deals nothing out
        owns = owns or getattr(optimizer, "dp_cp_params_list", ()) is not None
    for each in optimizer.chained_optimizers:
        yield from single_optimizers(each, owns)


def main_parameters(optimizer: Any, owns: bool = False) -> Iterator[MainParameter]:
    """List what a single optimizer steps on, on this rank; NotImplementedError for an optimizer of another kind."""
    if getattr(optimizer, "is_stub_optimizer", False):
        return
    if all(hasattr(optimizer, name) for name in _OF_SHARDS):
        # Every data-parallel rank has pieces of its own; further instances of the optimizer have the same pieces again.
        is_counted = getattr(optimizer, "distributed_optimizer_instance_id", 0) == 0
        yield from (MainParameter(tensor, parameter, is_counted) for tensor, parameter in _shards(optimizer))
    elif all(hasattr(optimizer, name) for name in _OF_COPIES):
        main = zip(_flat(optimizer.fp32_from_float16_groups), _flat(optimizer.float16_groups), strict=True)
        whole = [*main, *((parameter, parameter) for parameter in _flat(optimizer.fp32_from_fp32_groups))]
        yield from (MainParameter(*pair, owns or _is_first_replica(pair[1])) for pair in whole)
    elif type(optimizer).__name__ == "FP32Optimizer":
        for parameter in _flat([group["params"] for group in optimizer.param_groups]):
            yield MainParameter(parameter, parameter, owns or _is_first_replica(parameter))
    else:
        raise NotImplementedError(
            "--adagc and Megatron's layer-wise optimizer, which spreads whole parameters over ranks, need --bf16: add "
            "it, or drop --use-distributed-optimizer or --adagc"
            if owns
            else f"--adagc does not know {type(optimizer).__name__}: use Adam or SGD, or drop --adagc"
        )


def gradient_of(tensor: Any) -> Tensor | None:
    """Return the finished gradient of such a tensor; the precision-aware optimizer keeps it in another place."""
    decoupled = getattr(tensor, "decoupled_grad", None)
    return tensor.grad if decoupled is None else decoupled


def _shards(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """Yield parameter and shard from the lists of Megatron's own copies: its parameter groups mix up data types."""
    model16, shard16, main16, model32, shard32 = (_flat(getattr(optimizer, name)) for name in _OF_SHARDS)
    for parameter, shard, main in zip(model16, shard16, main16, strict=True):
        yield (shard if main is None else main), parameter  # a precision-aware optimizer has no main parameters
    yield from zip(shard32, model32, strict=True)


def _is_first_replica(parameter: Any) -> bool:
    from megatron.core import parallel_state

    if not getattr(parameter, "allreduce", True):  # an expert's
        return parallel_state.get_expert_data_parallel_rank() == 0
    return parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
