# SPDX-License-Identifier: Apache-2.0
"""What is wrapped around Megatron's training loop: flags, set-up, the step's number, the log and the resume."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from simreg_megatron.adagc.clipping import Clipping
from simreg_megatron.config import SimRegConfig
from simreg_megatron.config.flags import (
    adagc_differences_to_checkpoint,
    adagc_from_args,
    config_from_args,
    differences_to_checkpoint,
)
from simreg_megatron.measures.naming import add_to_console, left_out_of_console
from simreg_megatron.notices import forget, log_once, say, warn
from simreg_megatron.plugin import compat, installation
from simreg_megatron.plugin.arguments import add_simreg_arguments
from simreg_megatron.plugin.before_training import make_ready
from simreg_megatron.plugin.refusals import refuse_arguments, refuse_models, refuse_silence, refuse_start_over
from simreg_megatron.plugin.regularizer import Regularizer
from simreg_megatron.plugin.writers import log_timer, logs_first_step, write_scalars
from simreg_megatron.sentences import one_line
from simreg_megatron.weights import learnable


def add_flags(add_megatron_arguments: Callable[..., Any]) -> Callable[..., Any]:
    return lambda parser: add_simreg_arguments(add_megatron_arguments(parser))


def set_up(setup_model_and_optimizer: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse what cannot work, before and after Megatron has built its models; make all ready for the first step."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        forget()  # where Megatron restarts a run in its process, the log of the new one is whole
        here = installation.current()
        regularizer = here.begin_run()
        here.checkpoint_config = None
        here.clipping = _clipping_of(compat.arguments()) if here.given_config is None else None
        if regularizer.config.active:
            refuse_arguments(compat.arguments(), regularizer.config)
        if regularizer.config.active or here.clipping is not None:
            refuse_start_over(compat.arguments())
        try:
            built = setup_model_and_optimizer(*args, **kwargs)
        except BaseException as error:  # torch's CheckpointException is no Exception
            _explain(error, regularizer.config)
            raise
        models, optimizer = built[:2]
        if regularizer.config.active:
            _make_ready(regularizer, models, compat.arguments())
        if optimizer is None:  # --skip-train
            here.clipping = None
        if here.clipping is not None:
            here.clipping.attach(optimizer, compat.unwrapped(models), compat.arguments())
            if (every := regularizer.config.every) > 1:
                warn(
                    f"AdaGC's averages follow the steps without SimReg, so with --simreg-every {every} it clips most "
                    "of the term away in the steps with it: drop one of the two"
                )
        return built

    return checked


def _explain(error: BaseException, config: SimRegConfig) -> None:
    """Raise a sentence about our scalars in the place of an error of Megatron's load, where it is about them."""
    args, before = compat.arguments(), installation.current().checkpoint_config
    if before is None and learnable.may_be_of_scalars(error):
        before = _config_of_checkpoint(args)
    is_distributed = bool(getattr(args, "use_distributed_optimizer", False))
    learnable.explain(error, config, before, is_distributed=is_distributed)


def _config_of_checkpoint(args: Any) -> SimRegConfig | None:
    """Where Megatron failed before it compared arguments."""
    from megatron.training import checkpointing

    try:
        state = checkpointing._load_base_checkpoint(args.load, args, rank0=True)[0]
        return config_from_args(state["args"])
    except Exception:  # what Megatron said is all that is known then
        return None


def _make_ready(regularizer: Regularizer, models: Any, args: Any) -> None:
    config = regularizer.config
    refuse_models(config, models, installation.current().model_classes)
    make_ready(regularizer, models, args, args.micro_batch_size, args.seq_length)
    regularizer.data_of_stages.begin(compat.unwrapped(models))
    if config.document_mask:
        regularizer.end_of_document = end_of_document()


def _clipping_of(args: Any) -> Clipping | None:
    config = adagc_from_args(args)
    return None if config is None else Clipping(config)


def end_of_document() -> int:
    """Token id that ends a document in Megatron's data sets."""
    from megatron.training.global_vars import get_tokenizer

    try:
        return int(get_tokenizer().eod)
    except (AttributeError, NotImplementedError, TypeError) as error:
        raise ValueError(
            "--simreg-document-mask has no effect with a tokenizer that has no end-of-document token: "
            "use another tokenizer, or drop it"
        ) from error


def begin_step(iteration: int, *, measures: bool, num_iterations: int | None = None) -> None:
    """Before step `iteration`, counted from 0, of a training of so many; `measures` the geometry of its hidden states
    for the log.

    With objective none, and where a schedule has ended, all that is computed is computed in these steps.
    """
    regularizer = installation.regularizer()
    regularizer.set_iteration(iteration, num_iterations)
    regularizer.metrics.wants_geometry = measures and regularizer.metrics.has_geometry


def tell_iteration(train_step: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(train_step)

    def with_iteration(*args: Any, **kwargs: Any) -> Any:
        regularizer = installation.regularizer()
        if not regularizer.config.active:
            return train_step(*args, **kwargs)
        given, settings = compat.named_arguments(signature, *args, **kwargs), compat.arguments()
        iteration = given.get("iteration")
        iteration = int(getattr(settings, "curr_iteration", 0)) if iteration is None else iteration
        is_first = not regularizer.strength.follows_iterations  # of this process: a resumed run has one, too
        measures = (is_first and logs_first_step()) or _is_log_step(iteration + 1)
        # Megatron counts the iterations of the whole training where it is given samples, too.
        begin_step(iteration, measures=measures, num_iterations=getattr(settings, "train_iters", None))
        result = train_step(*args, **kwargs)
        refuse_silence(regularizer, given["model"])
        return result

    return with_iteration


def _is_log_step(iteration: int) -> bool:
    return iteration % _log_interval() == 0


def _log_interval() -> int:
    """Steps from one of SimReg's log lines to the next."""
    return int(installation.regularizer().config.log_interval or compat.arguments().log_interval)


def report(training_log: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(training_log)

    def with_simreg(*args: Any, **kwargs: Any) -> Any:
        given = compat.named_arguments(signature, *args, **kwargs)
        iteration, logs = given["iteration"], _is_log_step(given["iteration"])
        first = bool(given.get("is_first_iteration")) and not logs  # a line of its own, in the middle of an interval
        adaptive = installation.clipping_in_force()
        if not (installation.regularizer().config.active or adaptive) or not (first or logs):
            return training_log(*args, **kwargs)
        total_loss_dict = given["total_loss_dict"]
        means = reduced_means(reset=not first) if installation.regularizer().config.active else {}
        if adaptive is not None:
            means |= adaptive.means(reset=not first)
        add_to_console(means, total_loss_dict, skipped=bool(given["skipped_iter"]))
        if not first:
            write_scalars(means, iteration)
            log_timer(compat.arguments(), iteration, _log_interval())
        result = training_log(*args, **kwargs)
        if left_out := left_out_of_console(means):
            say(f"SimReg at iteration {iteration}, beside Megatron's line, which has no numbers below 0: {left_out}")
        for name in means:  # interval means, not sums: Megatron must not go on adding to them
            total_loss_dict.pop(name, None)
        return result

    return with_simreg


def reduced_means(model: Any = None, *, reset: bool = True) -> dict[str, Any]:
    """Of all ranks, by the groups of the model: a collective on those that saw SimReg, and on all where earlier stages
    may have.

    Where SimReg only measures, the values are of a log step alone, and gone afterwards in any case.
    """
    regularizer = installation.regularizer()
    pipeline = compat.pipeline_group(model) if regularizer.config.layer_numbers else None
    several = pipeline if pipeline is not None and pipeline.size() > 1 else None
    data_group, resets = compat.data_group(model, with_context=True), reset or not regularizer.trains
    means = regularizer.metrics.reduce(data_group, several, reset=resets)
    return means | regularizer.lambdas() if means else {}


def compare_with_checkpoint(check_checkpoint_args: Callable[..., Any]) -> Callable[..., Any]:
    def compared(checkpoint_args: Any, *args: Any, **kwargs: Any) -> Any:
        here, now = installation.current(), compat.arguments()
        try:
            here.checkpoint_config = config_from_args(checkpoint_args)
            _tell(differences_to_checkpoint(checkpoint_args, now))
        except Exception as error:  # a damaged record may be anything
            _tell_unreadable("SimReg", "--simreg-*", error, is_on=config_from_args(now).active)
        try:
            _tell(adagc_differences_to_checkpoint(checkpoint_args, now))
        except Exception as error:
            _tell_unreadable("AdaGC", "--adagc*", error, is_on=adagc_from_args(now) is not None)
        return check_checkpoint_args(checkpoint_args, *args, **kwargs)

    return compared


STATE_KEY = "simreg_adagc"
"""Where AdaGC's state lies in the learning-rate scheduler's part of a checkpoint, which every format of Megatron
keeps."""


def save_adagc(state_dict: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the scheduler's `state_dict`."""

    def with_adagc(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        state, clipping = state_dict(scheduler, *args, **kwargs), installation.clipping_in_force()
        own = clipping.state_dict() if clipping else {}
        return {**state, STATE_KEY: own} if own else state

    return with_adagc


def load_adagc(load_state_dict: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the scheduler's `load_state_dict`."""

    def with_adagc(scheduler: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if clipping := installation.clipping_in_force():
            clipping.load_state_dict(state.get(STATE_KEY))
        elif STATE_KEY in state:
            if compat.has_parsed_arguments() and getattr(compat.arguments(), "ckpt_convert_format", None):
                raise ValueError(
                    "the checkpoint was written with --adagc, and a conversion without it would lose its averages: add "
                    "--adagc to this command, too"
                )
            log_once("AdaGC: the checkpoint was written with --adagc, and this run continues without it")
        return load_state_dict(scheduler, state, *args, **kwargs)

    return with_adagc


def _tell(differences: Iterable[str]) -> None:
    for difference in differences:
        log_once(f"SimReg: {difference}")


def _tell_unreadable(name: str, flags: str, error: Exception, *, is_on: bool) -> None:
    """A run with these settings must know those before; one without them goes on from any checkpoint."""
    what = f"the checkpoint's settings of {name} cannot be read ({one_line(error)})"
    if is_on:
        raise ValueError(
            f"{what}: resume with the version of simreg_megatron that wrote it, or drop the {flags} flags to resume "
            f"without {name}"
        ) from None
    warn(f"{what}: the run resumes without {name}, as its flags say")
