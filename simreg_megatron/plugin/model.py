# SPDX-License-Identifier: Apache-2.0
"""Wrappers of functions of the model: its loss, constructor and decoder.

A model whose class overrides or replaces the wrapped functions would train without SimReg and say nothing. Megatron's
own loop is checked for that after each step, and each model at the end of its forward pass.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable
from typing import Any

import torch

from simreg_megatron.parallel import learnable
from simreg_megatron.plugin import compat, installation
from simreg_megatron.plugin.installation import Installation
from simreg_megatron.plugin.refusals import OTHER_LOSS, WAY_OUT, refuse_decoder
from simreg_megatron.plugin.term import Terms


def regularize(postprocess: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a model's `_postprocess`, and add SimReg's gradient to the loss that it returns."""
    state = installation.installed()
    if state is None or model in state.inside:  # uninstalled since; or a parent class's wrapper, called in its own
        return postprocess(model, *args, **kwargs)
    state.called.add(model)
    if not _is_active(state, model):
        return postprocess(model, *args, **kwargs)
    arguments = compat.named_arguments(postprocess, model, *args, **kwargs) if args else kwargs
    state.inside.add(model)
    try:
        run = functools.partial(postprocess, model, *args, **kwargs)
        loss, terms = _in_order(model, run, lambda: _terms(state, model, arguments, arguments["hidden_states"]))
    finally:
        state.inside.discard(model)
    return state.regularizer().add_to(loss, terms)


def regularize_forward(forward: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the `forward` of a model that computes its loss there: hook its decoder, whose output is hidden states."""
    state = installation.current()
    state.called.add(model)
    if not _is_active(state, model):
        return forward(model, *args, **kwargs)
    arguments = compat.named_arguments(forward, model, *args, **kwargs)
    states: list[Any] = []

    def keep(_: Any, __: Any, output: Any) -> None:
        states.append(output[0] if isinstance(output, tuple) else output)

    run = functools.partial(forward, model, *args, **kwargs)
    with model.decoder.register_forward_hook(keep):
        loss, terms = _in_order(model, run, lambda: _terms(state, model, arguments, states[-1]))
    return state.regularizer().add_to(loss, terms)


def _in_order(model: Any, run: Callable[[], Any], compute: Callable[[], Terms | None]) -> tuple[Any, Terms | None]:
    """Return the loss from `run` and the terms from `compute`, which is called after the output layer, or after `run`.

    The output layer and the loss keep a GPU busy for milliseconds, in which the host prepares the terms. Autograd runs
    the newest node first, so that their backward lies between those of the loss and of the output layer.
    """
    terms: list[Terms | None] = []

    def compute_once(*_: Any) -> None:
        if not terms:  # multi-token prediction calls the output layer several times
            terms.append(compute())

    layer = getattr(model, "output_layer", None)
    with contextlib.nullcontext() if layer is None else layer.register_forward_hook(compute_once):
        loss = run()
    compute_once()
    return loss, terms[0]


def prepare(initialize: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> None:
    """Call the constructor: scalars that an objective trains join the model before it is wrapped or loaded."""
    initialize(model, *args, **kwargs)
    state = installation.current()
    has_settings = state.given_config is not None or compat.arguments() is not None  # else Megatron parses them later
    if has_settings and (config := state.regularizer().config).active:
        learnable.add_to(model, learnable.wanted(config))
        watch(model)


def _is_active(state: Installation, model: Any) -> bool:
    """Return whether this forward pass trains, on the stage that computes the loss, with SimReg on."""
    trains = getattr(model, "post_process", True) and model.training and torch.is_grad_enabled() and not state.paused
    return trains and state.regularizer().config.active


def _terms(state: Installation, model: Any, arguments: dict[str, Any], hidden_states: Any) -> Terms | None:
    """Compute the terms of a micro-batch from hidden states [S, B, D] and the other `arguments` of the wrapped call."""
    labels, regularizer = arguments.get("labels"), state.regularizer()
    if arguments.get("inference_context") is not None or (labels is None and model in state.had_labels):
        regularizer.inner_states.forget(model)  # one that had labels before may be asked for its logits, too
        return None
    if labels is None:
        raise NotImplementedError(
            f"this {type(model).__name__} trains without labels, so its loss is computed elsewhere, where "
            f"SimReg cannot add its term: pass labels to the model, {WAY_OUT}"
        )
    state.had_labels.add(model)
    if arguments.get("output_processor") is not None:
        raise NotImplementedError(OTHER_LOSS)
    loss_mask = arguments.get("loss_mask")
    if model in state.loss_masks:
        stored, state.loss_masks[model] = state.loss_masks[model], None
        loss_mask = stored if loss_mask is None else loss_mask
        if loss_mask is None:  # its labels alone do not say: LLaVA's last position of an image has one
            raise NotImplementedError(
                f"this {type(model).__name__} lies inside a multimodal model and is given no loss mask, so SimReg "
                f"would count positions of images: pass loss_mask to the language model, {WAY_OUT}"
            )
    return regularizer.terms(model, hidden_states, labels, loss_mask, arguments.get("packed_seq_params"))


def keep_loss_mask(function: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function that returns (states, labels, loss mask, ...): keep the mask, which the language model lacks."""
    outputs = function(model, *args, **kwargs)
    if model.language_model is not None:
        installation.current().loss_masks[compat.language_models(model)[0]] = outputs[2]
    return outputs


def catch_inner_states(forward: Callable[..., Any], decoder: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the decoder's `forward`: keep the states that will be trained on or measured."""
    state = installation.current()
    regularizer = state.regularizer()
    if not (_is_active(state, decoder) and regularizer.computes_now):
        return forward(decoder, *args, **kwargs)
    refuse_decoder(regularizer.config, decoder)
    return regularizer.inner_states.catch(forward, decoder, *args, **kwargs)


def watch(model: Any) -> None:
    """Check this model after each of its forward passes."""
    if _check_call not in model._forward_hooks.values():
        installation.current().watches.append(model.register_forward_hook(_check_call))


def watch_built(classes: tuple[type, ...]) -> None:
    """Watch the models that were built before `install()`, too."""
    for candidate in gc.get_objects():
        if issubclass(type(candidate), classes):
            watch(candidate)


def check_forward(forward: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `forward`: models that are called without their hooks are checked, too."""
    state = installation.current()
    state.called.discard(model)
    output = forward(model, *args, **kwargs)
    _refuse_bypass(state, model)
    return output


def _check_call(model: Any, *_: Any) -> None:
    state = installation.installed()
    if state is not None:
        _refuse_bypass(state, model)
        state.called.discard(model)


def _refuse_bypass(state: Installation, model: Any) -> None:
    if model not in state.called and _is_active(state, model):
        raise NotImplementedError(
            f"this {type(model).__name__} ended a training forward pass without calling the function that SimReg "
            f"wraps, {compat.MODEL_SEAM.path}: make the _postprocess or forward in its place call it, {WAY_OUT}"
        )
