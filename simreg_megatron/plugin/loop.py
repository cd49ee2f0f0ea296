# SPDX-License-Identifier: Apache-2.0
"""Wrappers of functions of Megatron's loop, and what any loop does before a step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from simreg_megatron.adagc.clipping import Clipping
from simreg_megatron.config import SimRegConfig, flags
from simreg_megatron.losses import trial
from simreg_megatron.losses.simreg import chosen_impl
from simreg_megatron.notices import forget, log_once, one_line, warn
from simreg_megatron.objectives import note_on_lambda
from simreg_megatron.parallel import learnable
from simreg_megatron.plugin import compat, installation, log, refusals
from simreg_megatron.plugin.model import watch
from simreg_megatron.plugin.tokens import device_of, open_row_group, rows_dtype

STATE_KEY = "simreg_adagc"  # AdaGC's in the scheduler's part of a checkpoint, which every format of Megatron keeps


def add_flags(add_megatron_arguments: Callable[..., Any], parser: Any) -> Any:
    return flags.add_simreg_arguments(add_megatron_arguments(parser))


def set_up(setup_model_and_optimizer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Refuse what cannot work, before and after Megatron has built its models; make all ready for the first step."""
    forget()  # where Megatron restarts a run in its process, the log of the new one is whole
    state, settings = installation.current(), compat.arguments()
    regularizer = state.begin_run()
    config, adagc = regularizer.config, flags.adagc_from_args(settings) if state.given_config is None else None
    state.clipping = None if adagc is None else Clipping(adagc)
    if config.active:
        refusals.refuse_arguments(settings, config)
    if config.active or adagc is not None:
        refusals.refuse_start_over(settings)
    built = setup_model_and_optimizer(*args, **kwargs)
    models, optimizer = built[:2]
    if config.active:
        refusals.refuse_models(config, models, state.model_classes)
        make_ready(models, settings, settings.micro_batch_size, settings.seq_length)
        if config.document_mask:
            regularizer.reader.end_of_document = end_of_document()
    if optimizer is None:  # --skip-train
        state.clipping = None
    if state.clipping is not None:
        state.clipping.attach(optimizer, compat.unwrapped(models), settings)
        if config.every > 1:
            warn(
                f"AdaGC's averages follow the steps without SimReg, so with --simreg-every {config.every} it clips "
                "most of the term away in the steps with it: drop one of the two"
            )
    return built


def end_of_document() -> int:
    """Return the id of the token that ends a document in Megatron's data sets."""
    from megatron.training.global_vars import get_tokenizer

    try:
        return int(get_tokenizer().eod)
    except (AttributeError, NotImplementedError, TypeError) as error:
        raise ValueError(
            "--simreg-document-mask has no effect with a tokenizer that has no end-of-document token: "
            "use another tokenizer, or drop it"
        ) from error


def begin_run(models: Any, *, micro_batch_size: int | None = None, seq_length: int | None = None) -> None:
    """Implement `simreg_megatron.loop.begin_run`, for other loops than Megatron's."""
    state = installation.current()
    regularizer = state.begin_run()
    config = regularizer.config
    if not config.active:
        return
    refusals.refuse_models(config, models, state.model_classes)
    language_models = compat.language_models(models)
    for model in language_models:
        refusals.refuse_settings(model.config, config)
        replicas = functools.partial(compat.data_group, model)
        refusals.refuse_micro_batch(config, model.config.hidden_size, micro_batch_size, replicas, packed=False)
        learnable.refuse_without(config, model)
        watch(model)
    make_ready(models, language_models[0].config, micro_batch_size, seq_length)


def make_ready(model_chunks: Any, settings: Any, micro_batch_size: int | None, seq_length: int | None) -> None:
    """Choose the kernels, and log one line an objective; `settings` are the flags, or the model's configuration."""
    regularizer, models = installation.regularizer(), compat.language_models(model_chunks)
    config = regularizer.config
    inside = set(models) - set(compat.unwrapped(model_chunks))
    installation.current().loss_masks |= dict.fromkeys(inside)  # such a one may count labels of images without a mask
    if refusals.is_whole_graph(settings):
        regularizer.strength.is_captured, regularizer.metrics.has_geometry = True, False
        log_once(f"SimReg: no geometry is measured with {refusals.WHOLE_GRAPH}; the log has its loss and lambda")
    if micro_batch_size and seq_length:
        choose_impl(config, models, micro_batch_size, seq_length)
    for model in models:
        if getattr(model, "post_process", True):
            open_row_group(model)
    log_once(f"SimReg: regularises {type(models[0]).__name__}")
    for part in config.parts:
        if warning := part.record.warning(part.options):
            warn(f"SimReg objective {part.objective}: {warning}")
        log_once(log.described(part, models[0]))
        if note := note_on_lambda(part.objective, part.lambda_, models[0].config.hidden_size):
            log_once(f"SimReg: {note}")


def choose_impl(config: SimRegConfig, models: list[Any], micro_batch_size: int, seq_length: int) -> None:
    """On GPUs with impl "auto": let all ranks choose the same implementation, if it is right on all (see `trial`).

    A collective over all ranks, those without hidden states of SimReg included. `seq_length` is over all ranks, too.
    """
    part = next((part for part in config.parts if part.is_simreg and part.impl == "auto"), None)
    device = device_of(models)
    if part is None or device.type != "cuda" or chosen_impl("auto", part.similarity, part.self_positive) == "reference":
        return
    # One rank computes on its part of the sequence, or on the part of the work that tensor ranks share.
    length = seq_length // (compat.context_group(models[0]).size() * compat.tensor_group(models[0]).size())
    length = max(length, min(part.chunk_size or seq_length, seq_length, 16384), 2)  # a chunk may be longer
    dtype, width = rows_dtype(part, models[0]), models[0].config.hidden_size
    shape = trial.Shape(micro_batch_size, length, width, part.chunk_size, dtype, part.tau)
    group = dist.group.WORLD if dist.is_initialized() else None
    chosen = trial.choose(shape, device, group, computes=any(getattr(model, "post_process", True) for model in models))
    log_once(f"SimReg: {chosen}")


def begin_step(iteration: int, *, measures: bool, num_iterations: int | None = None) -> None:
    """Call before each step.

    Args:
        iteration: number of the step, from 0; a resumed run continues the count.
        measures: whether to measure cosines, angles and margins in this step for the log. Other steps compute nothing
            with objective none, and after a schedule has switched the term off.
        num_iterations: length of the whole training; required by a lambda schedule that depends on it.

    Raises:
        RuntimeError, ValueError: the lambda schedule needs `num_iterations`; or these leave no step with SimReg.
    """
    regularizer = installation.regularizer()
    regularizer.strength.set_iteration(iteration, num_iterations)
    regularizer.metrics.wants_geometry = measures and regularizer.metrics.has_geometry


def count_steps(train_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call Megatron's `train_step`: lambda follows its number, and a step that passed SimReg by is an error."""
    regularizer = installation.regularizer()
    if not regularizer.config.active:
        return train_step(*args, **kwargs)
    arguments, settings = compat.named_arguments(train_step, *args, **kwargs), compat.arguments()
    iteration = arguments.get("iteration")
    iteration = int(getattr(settings, "curr_iteration", 0)) if iteration is None else iteration
    is_first = not regularizer.strength.follows_iterations  # of this process: a resumed run has one, too
    measures = (is_first and compat.logs_first_step()) or log.is_log_step(iteration + 1)
    # Megatron counts the iterations of the whole training where it is given samples, too.
    begin_step(iteration, measures=measures, num_iterations=getattr(settings, "train_iters", None))
    result = train_step(*args, **kwargs)
    regularizer.check_gradient_arrived(arguments["model"])
    return result


def compare_with_checkpoint(check: Callable[..., Any], checkpoint_args: Any, *args: Any, **kwargs: Any) -> Any:
    """Call Megatron's comparison of its flags with a checkpoint's: log the settings of ours that differ."""
    both = (("SimReg", flags.SIMREG_FLAGS, flags.config_from_args), ("AdaGC", flags.ADAGC_FLAGS, flags.adagc_from_args))
    for name, family, read in both:
        try:
            for difference in flags.differences(family, read, checkpoint_args, compat.arguments()):
                log_once(f"SimReg: {difference}")
        except Exception as error:  # a damaged record may be anything
            warn(f"the checkpoint's settings of {name} cannot be read ({one_line(error)}): the flags decide")
    return check(checkpoint_args, *args, **kwargs)


def save_adagc(state_dict: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    state, clipping = state_dict(scheduler, *args, **kwargs), installation.current().clipping
    adagc_state = clipping.state_dict() if clipping else {}
    return {**state, STATE_KEY: adagc_state} if adagc_state else state


def load_adagc(load: Callable[..., Any], scheduler: Any, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    if clipping := installation.current().clipping:
        clipping.load_state_dict(state_dict.get(STATE_KEY))
    elif STATE_KEY in state_dict:
        log_once("AdaGC: the checkpoint was written with --adagc, and this run continues without it")
    return load(scheduler, state_dict, *args, **kwargs)
