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
from simreg_megatron.plugin.refusals import num_data_ranks, refuse_rows, refuse_shape, refuse_unknown_loss
from simreg_megatron.plugin.regularizer import Terms
from simreg_megatron.weights import learnable


def inside(config: SimRegConfig) -> Iterator[tuple[compat.Seam, Wrapper]]:
    """For settings that name states inside the decoder."""
    yield compat.DECODER_SEAM, catch_inner_states
    if config.layer_numbers:
        yield compat.STAGE_SEAM, add_terms_of_stage
        if compat.training_loop() is not None:
            yield compat.DATA_SEAM, build_data_of_stages


def regularize(postprocess: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function of a model that is given its final hidden states and the labels, and returns the loss."""
    signature = inspect.signature(postprocess)

    @functools.wraps(postprocess)
    def with_simreg(model: Any, *args: Any, **kwargs: Any) -> Any:
        here = installation.installed()
        # SimReg was uninstalled, but this wrapper is still referenced; or a parent class has a wrapped one, too.
        if here is None or model in here.entered:
            return postprocess(model, *args, **kwargs)
        here.passed.add(model)
        if not is_on(model):
            return postprocess(model, *args, **kwargs)
        given = compat.named_arguments(signature, model, *args, **kwargs)
        terms = _terms(model, given, given["hidden_states"])
        here.entered.add(model)
        try:
            loss = postprocess(model, *args, **kwargs)
        finally:
            here.entered.discard(model)
        return _add_to(loss, terms)

    return with_simreg


def regularize_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the `forward` of a model that computes its loss there: hook its decoder, whose output is hidden states."""
    signature = inspect.signature(forward)

    def with_simreg(model: Any, *args: Any, **kwargs: Any) -> Any:
        installation.current().passed.add(model)
        if not is_on(model):
            return forward(model, *args, **kwargs)
        given = compat.named_arguments(signature, model, *args, **kwargs)
        terms: list[Terms | None] = []

        def compute(_: Any, __: Any, output: Any) -> None:
            terms.append(_terms(model, given, output[0] if isinstance(output, tuple) else output))

        handle = model.decoder.register_forward_hook(compute)
        try:
            loss = forward(model, *args, **kwargs)
        finally:
            handle.remove()
        return _add_to(loss, terms[-1])

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
    """Return whether this forward pass trains, on the stage that computes the loss, with SimReg on."""
    trains = model.post_process and model.training and torch.is_grad_enabled()
    return bool(trains and not installation.current().paused and installation.regularizer().config.active)


def _terms(model: Any, given: dict[str, Any], hidden_states: Any) -> Terms | None:
    """Compute the terms of a micro-batch from its hidden states [S, B, D]; `given` has the call's other arguments."""
    if given.get("inference_context") is not None:
        return None
    labels = given.get("labels")
    if labels is None:
        _refuse_unlabelled(model)
        return None
    installation.current().met.add(model)
    refuse_unknown_loss(model, given)
    regularizer, packing = installation.regularizer(), given.get("packed_seq_params")
    refuse_rows(
        regularizer.config,
        width=hidden_states.shape[-1],
        num_sequences=len(labels),
        num_data_ranks=functools.partial(num_data_ranks, model),
        packed=packing is not None,
    )
    return regularizer.terms(model, hidden_states, labels, given.get("loss_mask"), packing)


def _add_to(loss: Any, terms: Terms | None) -> Any:
    if terms is None:
        return loss
    refuse_shape(loss, terms.labels)
    return installation.regularizer().add_to(loss, terms)


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
