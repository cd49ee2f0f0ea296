# SPDX-License-Identifier: Apache-2.0
"""One name for each parameter of the whole model, the same in every layout, and who speaks for it.

Megatron counts layers and experts anew on every rank; here layers are counted over all pipeline stages and experts
over all expert-parallel ranks. Tensor-parallel shards of a parameter share its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

_LAYER = re.compile(r"(?:^|\.)layers\.\d+$")
_SEQUENTIAL_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")
_GROUPED_EXPERT = re.compile(r"(?<=\.experts\.)(linear_fc[12]\.(?:weight|bias))(\d+)$")
_ALL_EXPERTS = re.compile(r"\.experts\.(?:weight[12]|linear_fc[12]\.(?:weight|bias))$")
_CUT_UNMARKED = re.compile(r"\.softmax_offset$|\.experts\.linear_fc1\.bias\d+$")  # the latter up to 0.18
_EMBEDDING = "embedding.word_embeddings.weight"


class Named(NamedTuple):
    """A parameter of this rank."""

    name: str
    parameter: Any
    contributes: bool  # its gradient counts in sums over all ranks: it is no replica over tensor parallelism, no copy
    whole: int  # elements of the parameter, over all tensor-parallel ranks
    is_cut: bool  # over these ranks, which otherwise all hold the same


def named_parameters(models: list[Any]) -> Iterator[Named]:
    """The parameters of this rank's pipeline stages that are trained.

    Args:
        models: without Megatron's wrappers around them.

    Raises:
        NotImplementedError: one tensor holds several experts, so that none of them has a norm of its own; or weights
            are cut further than tensor parallelism cuts them.
    """
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
            for local, counted in layers.items():
                if name.startswith(local):
                    name = counted + name.removeprefix(local)
                    break
            name = _counted_experts(name, model.config)
            is_cut = bool(getattr(parameter, "tensor_model_parallel", False) or _CUT_UNMARKED.search(name))
            speaks = not is_copy and (is_cut or _is_first_rank(parameter))
            yield Named(name, parameter, speaks, _whole(name, parameter, is_cut=is_cut), is_cut)


def is_expert(parameter: Any) -> bool:
    return not getattr(parameter, "allreduce", True)


def _is_first_rank(parameter: Any) -> bool:
    """It speaks for what all tensor-parallel ranks hold."""
    from megatron.core import parallel_state

    if is_expert(parameter):
        return parallel_state.get_expert_tensor_parallel_rank() == 0
    return parallel_state.get_tensor_model_parallel_rank() == 0


def _whole(name: str, parameter: Any, *, is_cut: bool) -> int:
    from megatron.core import parallel_state

    if getattr(parameter, "is_gtp_weight_remat", False):  # from 0.19 on
        raise NotImplementedError(
            f"--adagc does not know how --tensor-parallel-num-weight-shards cuts {name}: drop one of them"
        )
    if not is_cut:
        return int(parameter.numel())
    if is_expert(parameter):
        return int(parameter.numel() * parallel_state.get_expert_tensor_parallel_world_size())
    return int(parameter.numel() * parallel_state.get_tensor_model_parallel_world_size())


def _counted_experts(name: str, config: Any) -> str:
    if _ALL_EXPERTS.search(name):
        raise NotImplementedError(
            f"--adagc clips every expert by itself, and {name} holds all of a rank's experts in one tensor: "
            "train with Transformer Engine's grouped experts or without --moe-grouped-gemm, or drop --adagc"
        )
    name = _SEQUENTIAL_EXPERT.sub(lambda found: str(_first_expert(config) + int(found[0])), name)
    return _GROUPED_EXPERT.sub(lambda found: f"{found[1]}{_first_expert(config) + int(found[2])}", name)


def _first_expert(config: Any) -> int:
    from megatron.core import parallel_state

    here = config.num_moe_experts // config.expert_model_parallel_size
    return parallel_state.get_expert_model_parallel_rank() * here
