# SPDX-License-Identifier: Apache-2.0
"""Functions to call from a training loop other than Megatron's own, around each step and for the log.

    install(config=SimRegConfig(lambda_=10))
    begin_run(models)
    for step in range(steps):
        begin_step(step, measures=step % 10 == 9, num_iterations=steps)
        ...                                             # forward, backward, optimizer
        log(end_step(models, reduces=step % 10 == 9))

A loop that calls none of them still trains with SimReg, as long as it passes labels to its models. But SimReg's values
are then neither measured nor logged (objective none is an error), lambda cannot follow a schedule, and `impl="auto"`
is tiled. `simreg_megatron.loop.contract.check` tests whether a loop trains correctly with SimReg.
"""

from __future__ import annotations

import inspect
from typing import Any

from simreg_megatron.config import SimRegConfig
from simreg_megatron.notices import refuse
from simreg_megatron.plugin import compat, installation, log, model
from simreg_megatron.plugin import loop as plugin_loop
from simreg_megatron.plugin.loop import begin_step
from simreg_megatron.plugin.refusals import WAY_OUT

__all__ = ["begin_run", "begin_step", "end_step", "settings", "wrap_model"]


def begin_run(models: Any, *, micro_batch_size: int | None = None, seq_length: int | None = None) -> None:
    """Call before the first step: check that SimReg supports the models, and log its settings.

    Args:
        models: the model, or the list of model chunks on this rank, with or without Megatron's wrappers around them.
        micro_batch_size, seq_length: of the run; without them, `impl="auto"` is tiled on a GPU, too.

    Raises:
        RuntimeError, ValueError, NotImplementedError: SimReg is not installed, or these models or settings do not fit.
    """
    if installation.current().given_config is None and compat.arguments() is None:
        raise ValueError("SimReg has no settings, as no flags are parsed here: pass install(config=SimRegConfig(...))")
    if settings().log_interval is not None:
        raise ValueError("SimReg log interval has no effect here, as end_step(reduces=...) says when to log: drop it")
    plugin_loop.begin_run(models, micro_batch_size=micro_batch_size, seq_length=seq_length)


def end_step(models: Any, *, reduces: bool) -> dict[str, Any]:
    """Call after each step. If `reduces`, returns SimReg's means since the last reduction by log name, else nothing.

    Args:
        reduces: whether to reduce them over the ranks now: a collective, so pass the same value on every rank.

    Raises:
        MegatronSeamError, NotImplementedError: no forward pass has called what SimReg wraps; or no gradient came back.
    """
    regularizer = installation.regularizer()
    if not regularizer.config.active:
        return {}
    regularizer.check_gradient_arrived(models)
    return log.reduced_means(compat.language_models(models)[0]) if reduces else {}


def wrap_model(model_class: type) -> None:
    """Add SimReg to a model class whose own `_postprocess` replaces Megatron's; call it after `install()`.

    `uninstall()` restores it. The term is added once, also if that function calls Megatron's.

    Args:
        model_class: with a `_postprocess` that takes `hidden_states`, [s, b, h] as Megatron has them, and `labels`,
            [b, s], and returns the loss per token, [b, s].

    Raises:
        RuntimeError, ValueError: SimReg is not installed, or the class has no such function.
    """
    state, name = installation.current(), compat.MODEL_SEAM.name
    function = vars(model_class).get(name)
    absent = {"hidden_states", "labels"} - set(inspect.signature(function).parameters if function else ())
    refuse(
        (function is None,
         f"{model_class.__name__} has no {name} of its own, so install() alone reaches it: do not wrap it"),
        (absent,
         f"{model_class.__name__}.{name} does not take {' and '.join(sorted(absent))}, of which SimReg is computed: "
         f"let it call Megatron's, {WAY_OUT}"),
    )  # fmt: skip
    state.wrap(model_class, name, model.regularize)
    if not issubclass(model_class, state.model_classes):
        state.model_classes += (model_class,)
        if "__init__" in vars(model_class):
            state.wrap(model_class, "__init__", model.prepare)


def settings() -> SimRegConfig:
    """Return the settings of the SimReg that is installed in this process."""
    return installation.regularizer().config
