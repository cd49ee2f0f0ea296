# SPDX-License-Identifier: Apache-2.0
"""Where Megatron's optimizers keep the gradients that they step on, and which rank counts each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from simreg_megatron.plugin import compat
from simreg_megatron.plugin.clip.parameters import is_expert

_ELSEWHERE = (
    "use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp", "optimizer_cpu_offload", "optimizer_cuda_graph"
)  # fmt: skip
# Lists of lists, an inner one for each parameter group: the model's parameters, and what is stepped on in their place.
_OF_SHARDS = (  # DistributedOptimizer
    "model_float16_groups", "shard_float16_groups", "shard_fp32_from_float16_groups", "model_fp32_groups",
    "shard_fp32_groups",
)  # fmt: skip
_OF_COPIES = (
    "float16_groups",
    "fp32_from_float16_groups",
    "fp32_from_fp32_groups",
)  # Float16OptimizerWithFloat16Params


class Stepped(NamedTuple):
    """A tensor that an optimizer steps on: a parameter, its float32 copy, or this rank's piece of one."""

    tensor: Any
    parameter: Any  # the model's
    counts: bool  # its gradient counts in sums over all ranks: no other data-parallel rank counts the same


def refuse_hidden(optimizer: Any, args: Any) -> None:
    """Refuse settings and optimizers whose gradients cannot be reached between unscaling and step.

    Raises:
        NotImplementedError: a flag moves the gradients elsewhere.
        MegatronSeamError: the optimizer lacks the methods that AdaGC wraps.
    """
    for flag in _ELSEWHERE:
        if getattr(args, flag, False):
            raise NotImplementedError(
                f"--adagc does not know where --{flag.replace('_', '-')} keeps the gradients: drop one of them"
            )
    for method in ("get_grad_norm", "step_with_ready_grads"):
        if not hasattr(optimizer, method):
            raise compat.MegatronSeamError(
                f"megatron-core {compat.megatron_version()} cannot carry AdaGC: {type(optimizer).__name__} has no "
                f"{method}; use megatron-core 0.12 or newer, or drop --adagc"
            )


class Member(NamedTuple):
    """An optimizer that is no chain of others."""

    optimizer: Any
    alone: bool  # what it steps on, no other data-parallel rank does: each has whole parameters of its own


def members(optimizer: Any, *, alone: bool = False) -> Iterator[Member]:
    """The optimizers of a chain, and of the chains in it: Muon's layer-wise optimizer is one."""
    if not hasattr(optimizer, "chained_optimizers"):
        yield Member(optimizer, alone)
        return
    if type(optimizer).__name__ == "LayerWiseDistributedOptimizer":  # one dense replica alone deals nothing out
        alone = alone or getattr(optimizer, "dp_cp_params_list", ()) is not None
    for member in optimizer.chained_optimizers:
        yield from members(member, alone=alone)


def stepped_on(optimizer: Any, alone: bool = False) -> Iterator[Stepped]:
    """Everything that a member steps on here.

    Raises:
        NotImplementedError: an optimizer of another kind.
    """
    if getattr(optimizer, "is_stub_optimizer", False):
        return
    if _has(optimizer, _OF_SHARDS):
        # Every data-parallel rank has pieces of its own; further instances of the optimizer have the same pieces again.
        counts = getattr(optimizer, "distributed_optimizer_instance_id", 0) == 0
        yield from (Stepped(tensor, parameter, counts) for tensor, parameter in _shards(optimizer))
    elif _has(optimizer, _OF_COPIES) or type(optimizer).__name__ == "FP32Optimizer":
        whole = _copies(optimizer) if _has(optimizer, _OF_COPIES) else _parameters(optimizer.param_groups)
        yield from (Stepped(tensor, parameter, alone or _is_first_replica(parameter)) for tensor, parameter in whole)
    elif alone:
        raise NotImplementedError(
            "--adagc and Megatron's layer-wise optimizer, which spreads whole parameters over ranks, need --bf16: add "
            "it, or drop --use-distributed-optimizer or --adagc"
        )
    else:
        raise NotImplementedError(f"--adagc does not know {type(optimizer).__name__}: use Adam or SGD, or drop --adagc")


def gradient_of(tensor: Any) -> Tensor | None:
    """The finished gradient of what is stepped on; the precision-aware optimizer keeps it in another place."""
    decoupled = getattr(tensor, "decoupled_grad", None)
    return tensor.grad if decoupled is None else decoupled


def _shards(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """Along the lists that Megatron copies the gradients along: positions in its parameter groups mix up data types."""
    of_float16 = zip(*(_flat(getattr(optimizer, name)) for name in _OF_SHARDS[:3]), strict=True)
    for parameter, shard, main in of_float16:  # a precision-aware optimizer has no main parameters
        yield (shard if main is None else main), parameter
    model_fp32, shard_fp32 = (_flat(getattr(optimizer, name)) for name in _OF_SHARDS[3:])
    yield from zip(shard_fp32, model_fp32, strict=True)


def _copies(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    yield from zip(_flat(optimizer.fp32_from_float16_groups), _flat(optimizer.float16_groups), strict=True)
    yield from ((parameter, parameter) for parameter in _flat(optimizer.fp32_from_fp32_groups))


def _parameters(groups: list[dict[str, Any]]) -> Iterator[tuple[Any, Any]]:
    yield from ((parameter, parameter) for group in groups for parameter in group["params"])


def _has(optimizer: Any, names: tuple[str, ...]) -> bool:
    return all(hasattr(optimizer, name) for name in names)


def _flat(groups: list[list[Any]]) -> list[Any]:
    return [entry for group in groups for entry in group]


def _is_first_replica(parameter: Any) -> bool:
    from megatron.core import parallel_state

    if is_expert(parameter):
        return parallel_state.get_expert_data_parallel_rank() == 0
    return parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
