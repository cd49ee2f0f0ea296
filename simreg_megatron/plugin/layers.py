# SPDX-License-Identifier: Apache-2.0
"""States inside the decoder: what enters the final norm, and outputs of numbered layers, also on earlier stages.

They are caught while the decoder runs, as what the next layer is given: the same tensor as the layer's output, and
where activations are recomputed the one that is in the graph. On the stage that computes the loss their term is added
to that loss. A pipeline stage before it adds the term to what it sends on, and has neither labels nor a loss: it reads
the labels itself (a data loader gives every rank of a data-parallel index the same micro-batches in the same order),
and makes the factor that Megatron's schedule puts before each token's loss on the last stage:

    weight_i = mask_i * loss scale                                            with --calculate-per-token-loss
    weight_i = mask_i * loss scale / (tokens of the micro-batch * micro-batches)       else

What divides gradients after the backward reaches all stages alike. At log time measures/agreement.py compares that
weight, and the labels, with those that the last stage really had.

Shapes: T tokens of a sequence, S tokens of this context rank, B micro-batch, D hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from simreg_megatron.config import SimRegConfig
from simreg_megatron.parallel.layout import ShardLayout
from simreg_megatron.plugin import compat

BEFORE_NORM = "before the final norm"
State = int | str  # a layer number, "final", or BEFORE_NORM


def held_layers(config: SimRegConfig, decoder: Any) -> tuple[int, ...]:
    """The named layers that lie in this decoder, ascending."""
    if not config.layer_numbers:
        return ()
    here = {layer.layer_number for layer in getattr(decoder, "layers", ())}
    return tuple(number for number in config.layer_numbers if number in here)


def holds_earlier_layers(config: SimRegConfig, model: Any) -> bool:
    """Whether this part of the model holds named layers, and does not compute the loss."""
    computes_loss = getattr(model, "post_process", True)
    return not computes_loss and bool(held_layers(config, getattr(model, "decoder", None)))


class InnerStates:
    """What was caught in each decoder since its loss was last computed, or its states were last sent on."""

    def __init__(self, config: SimRegConfig) -> None:
        self.config = config
        self._caught: WeakKeyDictionary[Any, dict[State, Tensor]] = WeakKeyDictionary()

    def catch(self, forward: Callable[..., Any], decoder: Any, *args: Any, **kwargs: Any) -> Any:
        """Run `forward(decoder, ...)` and keep the wanted states."""
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

    def take(self, model: Any, final: Tensor | None = None) -> dict[State, Tensor]:
        """The states of `model` that the settings name, in their order; `final` is what the last decoder returned.

        Raises:
            NotImplementedError: one was not caught, or was computed without a graph.
        """
        if not self.config.looks_inside:
            return {} if final is None else {"final": final}
        states = self._caught.pop(model.decoder, {})
        wanted: list[State] = [*held_layers(self.config, model.decoder)]
        if final is not None and self.config.placement == "pre-norm":
            wanted.append(BEFORE_NORM)
        for name in wanted:
            if name not in states:
                which = name if name == BEFORE_NORM else f"of layer {name}"
                raise NotImplementedError(
                    f"the states {which} did not come by, as this loop "
                    "does not call the decoder and its layers as modules in training (CUDA graphs and schedules that "
                    "take layers apart do not, either): let it do so, or drop --simreg-layers and --simreg-placement"
                )
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


class MicroBatch(NamedTuple):
    """What an earlier stage knows of the tokens whose states it holds, all [B, S]."""

    labels: Tensor
    loss_mask: Tensor
    weights: Tensor  # of each token's language-model loss in what Megatron differentiates


class _Reader:
    """A data iterator that remembers what the script's own forward step took from it."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self._taken: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._iterator)
        self._taken.append(dict(batch) if isinstance(batch, dict) else batch)  # the script may cut its own in place
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def batch(self) -> dict[str, Any] | None:
        """The micro-batch of this forward step: what the script read, or the next one; None if there is not one."""
        if not self._taken:
            next(self)
        return self._taken[0] if len(self._taken) == 1 and isinstance(self._taken[0], dict) else None


def with_terms(
    forward_step_func: Callable[..., Any], add_to: Callable[..., Tensor], config: Any, num_microbatches: int
) -> Callable[..., Any]:
    """Wrap the script's forward step on an earlier stage: `add_to(output, model, MicroBatch)` replaces its output."""

    def forward_step(data_iterator: Any, model: Any, *more: Any) -> Any:
        reader = None if data_iterator is None else _Reader(data_iterator)
        output, loss_function = forward_step_func(reader, model, *more)
        part = compat.unwrapped(model)[0]
        labels, loss_mask = _labels(reader, part, output)
        weights = token_weights(loss_mask, config, num_microbatches, compat.context_group(part))
        return add_to(output, part, MicroBatch(labels, loss_mask, weights)), loss_function

    return forward_step


def _labels(reader: _Reader | None, model: Any, output: Any) -> tuple[Tensor, Tensor]:
    """Labels and loss mask [B, S] of the micro-batch that just ran: read on tensor rank 0, and broadcast."""
    tp, cp = compat.tensor_group(model), compat.context_group(model)
    if getattr(model, "mtp_process", False):  # what it sends on holds those states, too
        raise NotImplementedError(
            "--simreg-layers names a layer of a pipeline stage before the last that holds layers of multi-token "
            "prediction, too: name layers of other stages, or move those to the last one"
        )
    num_rows, num_sequences = output.shape[:2]
    shape = num_sequences, num_rows * (tp.size() if model.config.sequence_parallel else 1)
    if tp.rank() == 0:
        if reader is None:
            here = [layer.layer_number for layer in model.decoder.layers]
            raise NotImplementedError(
                f"--simreg-layers names a layer of the pipeline stage with layers {here[0]} to {here[-1]}, which has "
                "no data and so no labels: let the script build its training set there too (where its "
                "is_dataset_built_on_rank decides), or name layers of the last stage"
            )
        batch = reader.batch() or {}
        read = (batch.get(name) for name in ("labels", "loss_mask"))
        found = [tensor for tensor in read if tensor is not None and tensor.shape == (shape[0], shape[1] * cp.size())]
        if len(found) < 2:
            raise NotImplementedError(
                "on pipeline stages before the last, SimReg needs one dictionary per micro-batch with labels and "
                "loss_mask [micro-batch, sequence], and this script's data loader gives something else: name only "
                "layers of the last stage in --simreg-layers"
            )
        runs = ShardLayout(found[0].shape[1], cp.size()).held((cp.rank(), 0))
        # The loader's own memory may be pinned, and what is cut from it on the host is not.
        labels, loss_mask = (tensor.to(output.device, non_blocking=True) for tensor in found)
        labels, loss_mask = (torch.cat([each[:, a:b] for a, b in runs], dim=1) for each in (labels, loss_mask))
        labels, loss_mask = labels.long().contiguous(), loss_mask.float().contiguous()
    else:
        labels = torch.empty(shape, dtype=torch.long, device=output.device)
        loss_mask = torch.empty(shape, dtype=torch.float32, device=output.device)
    if tp.size() > 1:
        for tensor in (labels, loss_mask):
            dist.broadcast(tensor, src=dist.get_global_rank(tp, 0), group=tp)
    return labels, loss_mask


def token_weights(loss_mask: Tensor, config: Any, num_microbatches: int, context_group: dist.ProcessGroup) -> Tensor:
    """What Megatron multiplies the per-token loss [B, S] with before its backward, without a host sync."""
    weights = loss_mask
    if not config.calculate_per_token_loss:
        tokens = loss_mask.sum()
        if compat.adds_up_tokens_of_context_ranks():
            dist.all_reduce(tokens, group=context_group)
            weights = weights * context_group.size()
        weights = weights / tokens.to(torch.int).clamp(min=1) / num_microbatches
    if config.grad_scale_func is not None:
        weights = weights * config.grad_scale_func(torch.ones(1, device=loss_mask.device))
    return weights


class DataOfStages:
    """Lets earlier stages with named layers build the training set, through the script's own provider."""

    def __init__(self, config: SimRegConfig) -> None:
        self.config = config
        self.parts: list[Any] = []  # of the model on this rank, in the order in which Megatron builds their data

    def build(self, build_iterators: Callable[..., Any], provider: Any, *args: Any, **kwargs: Any) -> Any:
        """`build_iterators(provider)` for the next part of the model."""
        if self.parts and holds_earlier_layers(self.config, self.parts.pop(0)):
            provider = _training_set_too(provider)
        return build_iterators(provider, *args, **kwargs)


def _training_set_too(provider: Any) -> Any:
    """Build data sets on tensor rank 0 of this stage, against the script's own choice, and keep the training set."""

    def provide(*args: Any, **kwargs: Any) -> Any:
        from megatron.core import parallel_state
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder as Builder

        added: list[Any] = []  # the builders that would have built nothing here
        initialize = Builder.__init__

        def also_here(builder: Any, *given: Any, **more: Any) -> None:
            initialize(builder, *given, **more)
            if not builder.is_built_on_rank() and parallel_state.get_tensor_model_parallel_rank() == 0:
                builder.is_built_on_rank = lambda: True
                added.append(builder)

        Builder.__init__ = also_here
        try:
            train, *others = provider(*args, **kwargs)
        finally:
            Builder.__init__ = initialize
        if added:  # what was built for the labels alone is not evaluated with
            others = [[None] * len(data) if isinstance(data, list) else None for data in others]
        return (train, *others)

    provide.is_distributed = getattr(provider, "is_distributed", False)  # type: ignore[attr-defined]
    return provide
