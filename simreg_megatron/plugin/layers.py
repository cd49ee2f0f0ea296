# SPDX-License-Identifier: Apache-2.0
"""States inside the decoder of the stage that computes the loss: what enters the final norm, and outputs of layers.

They are caught while the decoder runs, as what the next layer is given: the same tensor as the layer's output, and
where activations are recomputed the one that is in the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from simreg_megatron.config import SimRegConfig

BEFORE_NORM = "before the final norm"
State = int | str  # a layer number, "final", or BEFORE_NORM


class InnerStates:
    """States caught in each decoder since its loss was last computed."""

    def __init__(self, config: SimRegConfig) -> None:
        self.config = config
        self._caught: WeakKeyDictionary[Any, dict[State, Tensor]] = WeakKeyDictionary()

    def catch(self, forward: Callable[..., Any], decoder: Any, *args: Any, **kwargs: Any) -> Any:
        """Run `forward(decoder, ...)` and keep the wanted states."""
        caught: dict[State, Tensor] = {}
        handles = list(self._watch(decoder, caught))
        try:
            output = forward(decoder, *args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        last = decoder.layers[-1].layer_number if len(decoder.layers) else None
        if last in self.config.layer_numbers:  # nothing follows it here
            caught.setdefault(last, output[0] if isinstance(output, tuple) else output)
        self._caught[decoder] = caught
        return output

    def _watch(self, decoder: Any, caught: dict[State, Tensor]) -> Iterator[Any]:
        """Hook what follows each wanted layer, while the decoder runs."""

        def keep(name: State, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            caught[name] = args[0] if args else kwargs["hidden_states"]

        final_norm = getattr(decoder, "final_layernorm", None)
        layers = list(decoder.layers)
        for layer, following in zip(layers, [*layers, final_norm][1:], strict=True):  # there may be no layer at all
            if layer.layer_number in self.config.layer_numbers and following is not None:
                hook = functools.partial(keep, layer.layer_number)
                yield following.register_forward_pre_hook(hook, with_kwargs=True)
        if self.config.placement == "pre-norm" and final_norm is not None:
            yield final_norm.register_forward_pre_hook(functools.partial(keep, BEFORE_NORM), with_kwargs=True)

    def forget(self, model: Any) -> None:
        """Drop the states of a model whose loss is not computed, and their graph."""
        if self._caught:
            self._caught.pop(model.decoder, None)

    def take(self, model: Any, final: Tensor) -> dict[State, Tensor]:
        """Return the states of `model` that the settings name, in order; `final` is what the last decoder returned.

        Raises:
            NotImplementedError: one was not caught, or was computed without a graph.
        """
        states = self._caught.pop(model.decoder, {})
        wanted: list[State] = [*self.config.layer_numbers]
        if self.config.placement == "pre-norm":
            wanted.append(BEFORE_NORM)
        for name in wanted:
            if name not in states:
                which = name if name == BEFORE_NORM else f"of layer {name}"
                raise NotImplementedError(
                    f"the states {which} did not come by, as this loop "
                    "does not call the decoder and its layers as modules in training (CUDA graphs and schedules that "
                    "take layers apart do not, either): let it do so, or drop --simreg-layers and --simreg-placement"
                )
        states["final"] = states[BEFORE_NORM] if self.config.placement == "pre-norm" else final
        found = {layer: states[layer] for layer in self.config.layers}
        for layer, state in found.items():
            if self.config.trains and not state.requires_grad:
                raise NotImplementedError(
                    f"the states of layer {layer} were computed without a graph (all parameters before it are frozen, "
                    "or it is recomputed), so SimReg cannot train on them: choose another layer in --simreg-layers"
                )
        return found
