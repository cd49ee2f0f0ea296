# SPDX-License-Identifier: Apache-2.0
"""Before the first step on GPUs: all ranks take the form of SimReg that is right and fastest there (see `trial`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from simreg_megatron import trial
from simreg_megatron.comparison import Shape
from simreg_megatron.config import SimRegConfig
from simreg_megatron.losses.simreg import AUTO, chosen_impl
from simreg_megatron.notices import log_once
from simreg_megatron.plugin import compat, inner


def settle(config: SimRegConfig, model_chunks: Any, micro_batch_size: int, seq_length: int) -> None:
    """Try the forms on this run's shape where `auto` is asked for and the model is on a GPU; else tiled stays.

    A collective over all ranks, those without hidden states of SimReg included.

    Args:
        seq_length: of the whole sequence, over all ranks that share it.
    """
    parts = [part for part in config.parts if part.is_simreg and part.impl == "auto"]
    models = compat.unwrapped(model_chunks)
    device = _device(models)
    if not parts or not _is_worth_trying(device):
        return
    if chosen_impl("auto", parts[0].similarity, parts[0].self_positive) == "reference":
        return
    shape = _shape(parts[0], models[0], micro_batch_size, seq_length)
    key = device.type, shape.dtype
    AUTO.pop(key, None)  # of a run before, in this process
    computes = any(
        getattr(model, "post_process", True) or inner.holds_earlier_layers(config, model) for model in models
    )
    own = trial.try_forms(shape, device) if computes else trial.idle()
    group = dist.group.WORLD if dist.is_initialized() else None
    trials = trial.agree(own, group, device)
    choose = trial.same_every_time if torch.are_deterministic_algorithms_enabled() else trial.fastest
    taken = choose(trials)
    trial.take(taken, shape, device)
    log_once(f"SimReg: {trial.sentence(trials, shape, taken)}")


def rows_like(config: SimRegConfig, model: Any) -> torch.Tensor:
    """None of the hidden states that the term is made of, but of their type and on their device."""
    return torch.empty(0, dtype=_dtype(config, model), device=_device([model]))


def _device(models: Sequence[Any]) -> torch.device:
    """Of their parameters; a part of a pipeline may have none."""
    for model in models:
        for parameter in model.parameters():
            return parameter.device
    return torch.device("cuda", torch.cuda.current_device())


def _shape(config: SimRegConfig, model: Any, micro_batch_size: int, seq_length: int) -> Shape:
    """What one rank computes on: its part of the sequence, or the part of the work that tensor ranks share."""
    length = seq_length // (compat.context_group(model).size() * compat.tensor_group(model).size())
    return Shape(
        micro_batch_size, max(length, 2), model.config.hidden_size, config.chunk_size, _dtype(config, model), config.tau
    )


def _dtype(config: SimRegConfig, model: Any) -> torch.dtype:
    """Of the states: the final norm takes a float32 residual stream to the parameters' type, inside it stays wide."""
    if config.looks_inside and getattr(model.config, "fp32_residual_connection", False):
        return torch.float32
    return getattr(model.config, "params_dtype", torch.float32)


def _is_worth_trying(device: torch.device) -> bool:
    """On a CPU there is one fast form."""
    return device.type == "cuda"
