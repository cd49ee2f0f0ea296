# SPDX-License-Identifier: Apache-2.0
"""What is wrapped around the model: its loss, its making, and its decoder where a state inside it is asked for."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from simreg_megatron.config import SimRegConfig
from simreg_megatron.plugin import bypass, compat, inner, installation, stages
from simreg_megatron.plugin.installation import Wrapper
from simreg_megatron.plugin.refusals import num_data_ranks, refuse_rows, refuse_unknown_loss
from simreg_megatron.weights import learnable


def inside(config: SimRegConfig) -> Iterator[tuple[compat.Seam, Wrapper]]:
    """For settings that name states inside the decoder."""
    yield compat.DECODER_SEAM, catch_inner_states
    if config.layer_numbers:
        yield compat.STAGE_SEAM, add_terms_of_stage
        if compat.training_loop() is not None:
            yield compat.DATA_SEAM, build_data_of_stages


def regularize(postprocess: Callable[..., Any]) -> Callable[..., Any]:
    """For models that are handed their final hidden states and the labels in one call."""
    signature = inspect.signature(postprocess)

    @functools.wraps(postprocess)
    def with_simreg(model: Any, *args: Any, **kwargs: Any) -> Any:
        here = installation.installed()
        if here is None:  # uninstalled since, where someone else keeps this wrapper
            return postprocess(model, *args, **kwargs)
        here.passed.discard(model)
        loss = postprocess(model, *args, **kwargs)
        if model in here.passed:  # by way of a function that is wrapped, too, such as that of the parent class
            return loss
        here.passed.add(model)
        if not _trains(model):
            return loss
        given = compat.named_arguments(signature, model, *args, **kwargs)
        return _add_to(loss, model, given, given["hidden_states"])

    return with_simreg


def regularize_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """For models that compute their loss inside `forward`: the decoder's output is caught on the way."""
    signature = inspect.signature(forward)

    def with_simreg(model: Any, *args: Any, **kwargs: Any) -> Any:
        installation.current().passed.add(model)
        if not is_on(model):
            return forward(model, *args, **kwargs)
        caught: list[Any] = []
        handle = model.decoder.register_forward_hook(lambda module, inputs, output: caught.append(output))
        try:
            loss = forward(model, *args, **kwargs)
        finally:
            handle.remove()
        given = compat.named_arguments(signature, model, *args, **kwargs)
        hidden_states = caught[-1]
        return _add_to(loss, model, given, hidden_states[0] if isinstance(hidden_states, tuple) else hidden_states)

    return with_simreg


def prepare(initialize: Callable[..., Any]) -> Callable[..., Any]:
    """Parameters that an objective trains belong to the model before anyone wraps or loads it; and it is watched."""

    def prepared(model: Any, *args: Any, **kwargs: Any) -> None:
        initialize(model, *args, **kwargs)
        config = installation.known_config()
        if config is not None and config.active:
            learnable.add_to(model, learnable.wanted(config))
            bypass.watch(model)

    return prepared


def is_on(model: Any) -> bool:
    """Whether this model's loss is to get a term, as far as a model itself can tell."""
    return _trains(model) and installation.regularizer().config.active


def _trains(model: Any) -> bool:
    return bool(model.post_process and model.training and torch.is_grad_enabled()) and not installation.current().paused


def _add_to(loss: Any, model: Any, given: dict[str, Any], hidden_states: Any) -> Any:
    if given.get("inference_context") is not None or not installation.regularizer().config.active:
        return loss
    labels = given.get("labels")
    if labels is None:
        _refuse_unlabelled(model)
        return loss
    installation.current().met.add(model)
    refuse_unknown_loss(model, given, loss)
    refuse_rows(
        installation.regularizer().config,
        width=hidden_states.shape[-1],
        num_sequences=len(labels),
        num_data_ranks=functools.partial(num_data_ranks, model),
        packed=given.get("packed_seq_params") is not None,
    )
    return installation.regularizer().add_to(
        loss,
        model,
        hidden_states=hidden_states,
        labels=labels,
        loss_mask=given.get("loss_mask"),
        packed_seq_params=given.get("packed_seq_params"),
    )


def _refuse_unlabelled(model: Any) -> None:
    """A model that had labels before may be asked for its logits, too."""
    if model not in installation.current().met:
        raise NotImplementedError(
            f"this {type(model).__name__} trains without labels, so its loss is computed elsewhere, where "
            f"SimReg cannot add its term: pass labels to the model, {bypass.WAY_OUT}"
        )


def catch_inner_states(forward: Callable[..., Any]) -> Callable[..., Any]:
    def caught(decoder: Any, *args: Any, **kwargs: Any) -> Any:
        states = installation.regularizer().inner_states
        if not (installation.regularizer().computes and inner.wants(states.config, decoder)):
            return forward(decoder, *args, **kwargs)
        return states.catch(forward, decoder, *args, **kwargs)

    return caught


def add_terms_of_stage(forward_step: Callable[..., Any]) -> Callable[..., Any]:
    """One micro-batch of one part of the model, as Megatron's pipeline schedules run it."""
    signature = inspect.signature(forward_step)

    def with_terms(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        (model,) = compat.unwrapped(given["model"])
        trains = model.training and torch.is_grad_enabled() and not given.get("collect_non_loss_data")
        regularizer = installation.regularizer()
        if trains and not installation.current().paused and inner.holds_earlier_layers(regularizer.config, model):
            given["forward_step_func"] = stages.with_terms(
                given["forward_step_func"], regularizer.add_to_stage, given["config"], given["num_microbatches"]
            )
        return forward_step(*bound.args, **bound.kwargs)

    return with_terms


def build_data_of_stages(build_iterators: Callable[..., Any]) -> Callable[..., Any]:
    def built(provider: Any, *args: Any, **kwargs: Any) -> Any:
        return installation.regularizer().data_of_stages.build(build_iterators, provider, *args, **kwargs)

    return built
