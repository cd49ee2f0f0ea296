# SPDX-License-Identifier: Apache-2.0
"""Hidden states from inside the decoder: outputs of numbered layers, and what enters the final norm.

They are caught while the decoder runs, as what the next layer is given: the same tensor as the layer's output, and
where activations are recomputed the one that hangs in the graph. On the stage that computes the loss their term hangs
on that loss; on an earlier stage (stages.py) on what the stage sends on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from simreg_megatron.config import SimRegConfig

BEFORE_NORM = "before the final norm"
State = int | str  # a layer number, "final", or BEFORE_NORM


class InnerStates:
    """What was caught in each decoder since its loss was last computed, or its states were last sent on."""

    def __init__(self, config: SimRegConfig) -> None:
        self.config = config
        self._caught: WeakKeyDictionary[Any, dict[State, Tensor]] = WeakKeyDictionary()

    def catch(self, forward: Callable[..., Any], decoder: Any, *args: Any, **kwargs: Any) -> Any:
        """Run `forward(decoder, ...)` and keep the wanted states."""
        refuse_decoder(self.config, decoder)
        if not decoder.post_process and kwargs.get("packed_seq_params") is not None:
            raise NotImplementedError(
                "SimReg does not support packed sequences on pipeline stages before the last: name only layers of the "
                "last stage in --simreg-layers, or train unpacked"
            )
        caught: dict[State, Tensor] = {}
        handles = list(self._watch(decoder, caught))
        try:
            output = forward(decoder, *args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        last = decoder.layers[-1].layer_number if len(decoder.layers) else None
        if last in held_layers(self.config, decoder):  # nothing follows it here
            caught.setdefault(last, output[0] if isinstance(output, tuple) else output)
        self._caught[decoder] = caught
        return output

    def _watch(self, decoder: Any, caught: dict[State, Tensor]) -> Iterator[Any]:
        """Hooks on what follows each wanted layer, while the decoder runs."""
        final_norm = getattr(decoder, "final_layernorm", None)
        layers = list(decoder.layers)
        for layer, following in zip(layers, [*layers, final_norm][1:], strict=True):  # there may be no layer at all
            if layer.layer_number in self.config.layer_numbers and following is not None:
                keep = functools.partial(_keep_input, caught, layer.layer_number)
                yield following.register_forward_pre_hook(keep, with_kwargs=True)
        if self.config.placement == "pre-norm" and final_norm is not None:
            keep = functools.partial(_keep_input, caught, BEFORE_NORM)
            yield final_norm.register_forward_pre_hook(keep, with_kwargs=True)

    def take(self, model: Any, final: Tensor | None = None) -> dict[State, Tensor]:
        """The states of `model` that the settings name, in their order; `final` is what the last decoder returned."""
        if not self.config.looks_inside:
            return {} if final is None else {"final": final}
        states = self._caught.pop(model.decoder, {})
        self._refuse_missing(model.decoder, states, is_last=final is not None)
        if final is not None:
            states["final"] = states[BEFORE_NORM] if self.config.placement == "pre-norm" else final
        found = {layer: states[layer] for layer in self.config.layers if layer in states}
        for layer, state in found.items():
            if self.config.trains and not state.requires_grad:
                raise NotImplementedError(
                    f"the states of layer {layer} were computed without a graph (all parameters before it are frozen, "
                    "or it is recomputed), so SimReg cannot train on them: choose another layer in --simreg-layers"
                )
        return found

    def _refuse_missing(self, decoder: Any, states: dict[State, Tensor], *, is_last: bool) -> None:
        wanted: list[State] = [*held_layers(self.config, decoder)]
        if is_last and self.config.placement == "pre-norm":
            wanted.append(BEFORE_NORM)
        missing = [state for state in wanted if state not in states]
        if missing:
            where = missing[0] if missing[0] == BEFORE_NORM else f"of layer {missing[0]}"
            raise NotImplementedError(
                f"the states {where} did not come by, as this loop does not call the decoder and its layers as "
                "modules in training (CUDA graphs and schedules that take layers apart do not, either): let it do so, "
                "or drop --simreg-layers and --simreg-placement"
            )


def _keep_input(
    caught: dict[State, Tensor], name: State, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    caught[name] = args[0] if args else kwargs["hidden_states"]


def held_layers(config: SimRegConfig, decoder: Any) -> tuple[int, ...]:
    """The named layers that lie in this decoder, ascending."""
    here = {layer.layer_number for layer in getattr(decoder, "layers", ())}
    return tuple(number for number in config.layer_numbers if number in here)


def holds_earlier_layers(config: SimRegConfig, model: Any) -> bool:
    """Whether this part of the model holds named layers, and does not compute the loss."""
    computes_loss = getattr(model, "post_process", True)
    return not computes_loss and bool(held_layers(config, getattr(model, "decoder", None)))


def refuse_decoder(config: SimRegConfig, decoder: Any) -> None:
    """Raise where this stage's decoder lacks a state that it should have, or recomputes it."""
    from megatron.core.transformer.transformer_block import TransformerBlock

    if not isinstance(decoder, TransformerBlock):
        raise NotImplementedError(
            f"SimReg sees only the final states of a {type(decoder).__name__}: drop --simreg-layers and "
            "--simreg-placement"
        )
    here = [layer.layer_number for layer in decoder.layers]
    beyond = [number for number in config.layer_numbers if here and number > here[-1]]
    if decoder.post_process and beyond:
        raise ValueError(f"--simreg-layers {beyond[0]} is beyond the model, whose last layer is {here[-1]}")
    for number in held_layers(config, decoder):
        _refuse_recomputed(decoder.config, number, here.index(number) + 1, len(here))
    if decoder.post_process and config.placement == "pre-norm" and getattr(decoder, "final_layernorm", None) is None:
        raise NotImplementedError(
            "--simreg-placement pre-norm needs the final norm on the stage that computes the loss, and it lies on an "
            "earlier one here: use post-norm, or another pipeline layout"
        )


def _refuse_recomputed(config: Any, number: int, place: int, num_layers: int) -> None:
    """Full recompute keeps what enters each group of layers; what lies inside a group has no graph in the forward."""
    if config.recompute_granularity != "full" or config.recompute_method != "uniform":
        return  # the method "block" recomputes each layer by itself
    size = config.recompute_num_layers
    if place % size and place != num_layers:
        last = min(number - place % size + size, number - place + num_layers)
        raise NotImplementedError(
            f"--simreg-layers {number} lies inside a group of {size} layers that full recompute runs as one: name "
            f"the group's last layer, {last}, or set --recompute-num-layers 1 or --recompute-method block"
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
    if config.layer_numbers and getattr(args, "distribute_saved_activations", False):
        raise NotImplementedError(
            "--distribute-saved-activations takes the states between layers apart before SimReg reads them: drop that "
            "flag, or --simreg-layers"
        )
    offloads = getattr(args, "fine_grained_activation_offloading", False) and (args.offload_modules or ())
    if config.layer_numbers and offloads and "attn_norm" in offloads:
        raise NotImplementedError(
            "--offload-modules attn_norm frees what enters a layer before SimReg reads it: leave attn_norm out, or "
            "drop --simreg-layers"
        )
    if config.layer_numbers and getattr(args, "enable_mhc_connections", False):
        raise NotImplementedError(
            "with --enable-mhc-connections several streams pass between layers, and no hidden state: drop that flag, "
            "or --simreg-layers"
        )
    graphs = _cuda_graph_flag(args)
    if config.layer_numbers and graphs:
        raise NotImplementedError(
            f"CUDA graphs replay layers without their hooks, so SimReg sees the final states only: drop {graphs}, or "
            "--simreg-layers"
        )


def _cuda_graph_flag(args: Any) -> str:
    """The flag that captures layers in CUDA graphs; up to 0.14 there were two."""
    if getattr(args, "cuda_graph_impl", "none") not in (None, "none"):
        return "--cuda-graph-impl"
    given = (name for name in ("enable_cuda_graph", "external_cuda_graph") if getattr(args, name, False))
    return "".join(f"--{name.replace('_', '-')}" for name in list(given)[:1])


def wants(config: SimRegConfig, decoder: Any) -> bool:
    """Whether this call of a decoder is one whose states will be trained on or measured."""
    has_states = decoder.post_process or bool(held_layers(config, decoder))
    return bool(has_states and decoder.training and torch.is_grad_enabled())
