# SPDX-License-Identifier: Apache-2.0
"""Hidden states from inside the decoder: outputs of numbered layers, and what enters the final norm.

They are caught while the decoder runs and used when the same model computes its loss, in the same autograd graph. So
their term hangs on that loss as the final states' does, with the weight that Megatron gives each token, and a layer
must lie on the stage that computes the loss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from simreg_megatron.config import SimRegConfig

BEFORE_NORM = "before the final norm"
State = int | str  # a layer number, or BEFORE_NORM


class InnerStates:
    """What was caught in each decoder since its loss was last computed."""

    def __init__(self, config: SimRegConfig) -> None:
        self.config = config
        self._caught: WeakKeyDictionary[Any, dict[State, Tensor]] = WeakKeyDictionary()

    def catch(self, forward: Callable[..., Any], decoder: Any, *args: Any, **kwargs: Any) -> Any:
        """Run `forward(decoder, ...)` and keep the wanted states."""
        refuse_decoder(self.config, decoder)
        caught: dict[State, Tensor] = {}
        layers = {layer.layer_number: layer for layer in decoder.layers}
        handles = [
            layers[number].register_forward_hook(functools.partial(_keep_output, caught, number))
            for number in self.config.layer_numbers
        ]
        if self.config.placement == "pre-norm":
            handles.append(decoder.final_layernorm.register_forward_pre_hook(functools.partial(_keep_input, caught)))
        try:
            return forward(decoder, *args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
            self._caught[decoder] = caught

    def take(self, model: Any, final: Tensor) -> list[Tensor]:
        """The states of `model` that the settings name, in their order; `final` is what its decoder returned."""
        if not self.config.looks_inside:
            return [final]
        caught = self._caught.pop(model.decoder)
        if self.config.placement == "pre-norm":
            final = caught[BEFORE_NORM]
        return [final if layer == "final" else caught[layer] for layer in self.config.layers]


def _keep_output(caught: dict[State, Tensor], number: int, module: Any, inputs: Any, output: Any) -> None:
    caught[number] = output[0] if isinstance(output, tuple) else output


def _keep_input(caught: dict[State, Tensor], module: Any, inputs: tuple[Any, ...]) -> None:
    caught[BEFORE_NORM] = inputs[0]


def refuse_decoder(config: SimRegConfig, decoder: Any) -> None:
    """Raise where this stage's decoder lacks a state that the settings name."""
    from megatron.core.transformer.transformer_block import TransformerBlock

    if not isinstance(decoder, TransformerBlock):
        raise NotImplementedError(
            f"SimReg sees the final states only of a {type(decoder).__name__}: drop --simreg-layers and "
            "--simreg-placement"
        )
    here = [layer.layer_number for layer in decoder.layers]
    for number in config.layer_numbers:
        if number not in here:
            held = f"layers {min(here)} to {max(here)}" if here else "none"
            raise NotImplementedError(
                f"--simreg-layers {number} lies on an earlier pipeline stage, where Megatron has no labels "
                f"(the last stage holds {held}): name a layer of the last stage, or train with fewer stages"
            )
    if config.placement == "pre-norm" and getattr(decoder, "final_layernorm", None) is None:
        raise NotImplementedError(
            "--simreg-placement pre-norm needs the final norm on the stage that computes the loss, and it lies on an "
            "earlier one here: use post-norm, or another pipeline layout"
        )


def refuse_arguments(config: SimRegConfig, args: Any) -> None:
    """Raise for flags of Megatron under which states inside the decoder cannot be caught once, with their graph."""
    beyond = [number for number in config.layer_numbers if number > args.num_layers]
    if beyond:
        raise ValueError(f"--simreg-layers {beyond[0]} is beyond the model, which has layers 1 to {args.num_layers}")
    if getattr(args, "overlap_moe_expert_parallel_comm", False):
        raise NotImplementedError(
            "under --overlap-moe-expert-parallel-comm Megatron never calls the decoder's layers as such, so SimReg "
            "sees the final states only: drop that flag, or --simreg-layers and --simreg-placement"
        )
    if config.layer_numbers and getattr(args, "recompute_granularity", None) == "full":
        raise NotImplementedError(
            "full recompute runs each layer twice, first without a graph, so SimReg sees the final states only: use "
            "--recompute-granularity selective, or drop --simreg-layers"
        )
    if config.layer_numbers and getattr(args, "cuda_graph_impl", "none") not in (None, "none"):
        raise NotImplementedError(
            "CUDA graphs replay layers without their hooks, so SimReg sees the final states only: drop "
            "--cuda-graph-impl, or --simreg-layers"
        )


def wants(decoder: Any) -> bool:
    """Whether this call of a decoder is one whose loss will be trained on."""
    return bool(decoder.post_process and decoder.training and torch.is_grad_enabled())
