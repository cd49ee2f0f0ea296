# SPDX-License-Identifier: Apache-2.0
"""`install()`: wrap a few functions of Megatron, one idea each, and give them back on `uninstall()`."""

from __future__ import annotations

import functools
from typing import Any

from simreg_megatron.config import SimRegConfig
from simreg_megatron.notices import warn
from simreg_megatron.plugin import compat, forms, installation, loop_hooks, model_hooks
from simreg_megatron.plugin.clip import clipping
from simreg_megatron.plugin.installation import Installation, Wrapper
from simreg_megatron.plugin.loop_hooks import begin_step
from simreg_megatron.plugin.refusals import refuse_models, refuse_silence

__all__ = ["begin_foreign_run", "begin_step", "end_foreign_step", "install", "settings", "uninstall"]

Wrapped = list[tuple[compat.Seam, Wrapper]]


def install(config: SimRegConfig | None = None) -> None:
    """Wrap Megatron's functions; see `simreg_megatron.install`."""
    before = installation.installed()
    if before is not None:
        if before.given_config != config:
            raise ValueError("SimReg is installed with other settings already: call uninstall() first")
        return
    has_loop = compat.training_loop() is not None
    if config is None and not has_loop:
        raise compat.MegatronSeamError(
            f"megatron-core {compat.megatron_version()} comes without megatron.training, so nobody parses --simreg-* "
            "flags: pass install(config=SimRegConfig(lambda_=...)), or put a Megatron-LM source tree on PYTHONPATH"
        )
    models = compat.model_seams()
    wrappers = _around_models(models) + (_around_loop(parses_flags=config is None) if has_loop else [])
    for seam, _ in wrappers:
        seam.holder()  # all seams are there, or nothing is wrapped
    if compat.is_untried_release():
        warn(
            f"SimReg was not yet tried with megatron-core {compat.megatron_version()}: all functions it wraps are "
            "there, so it goes on; compare a short run with --simreg-lambda 0 and without the plugin first"
        )
    new = Installation(config, model_hooks.inside)
    for seam, wrapper in wrappers:
        new.wrap(seam, wrapper)
    new.model_classes = tuple(seam.holder() for seam in models)
    installation.keep(new)
    if config is not None:
        new.regularizer()


def uninstall() -> None:
    """Restore every wrapped function; see `simreg_megatron.uninstall`."""
    before = installation.installed()
    if before is not None:
        before.unwrap_all()
        installation.keep(None)


def _around_models(models: Any) -> Wrapped:
    wrappers: Wrapped = [
        (seam, model_hooks.regularize if seam is compat.MODEL_SEAM else model_hooks.regularize_forward)
        for seam in models
    ]
    wrappers += [(compat.built(seam), model_hooks.add_parameters) for seam in models]
    if compat.MODEL_SEAM in models:
        wrappers.append((compat.FORWARD_SEAMS[0], model_hooks.refuse_own_postprocess))
    return wrappers


def _around_loop(*, parses_flags: bool) -> Wrapped:
    wrappers: Wrapped = [
        (compat.SETUP_SEAM, loop_hooks.set_up),
        (compat.STEP_SEAM, loop_hooks.tell_iteration),
        (compat.LOG_SEAM, loop_hooks.report),
    ]
    if parses_flags:
        state_dict, load_state_dict = compat.SCHEDULER_SEAMS
        wrappers += [
            (compat.ARGUMENTS_SEAM, loop_hooks.add_flags),
            (compat.RESUME_SEAM, loop_hooks.compare_with_checkpoint),
            (state_dict, functools.partial(clipping.saving, installation.clipping_in_force)),
            (load_state_dict, functools.partial(clipping.loading, installation.clipping_in_force)),
        ]
    return wrappers


def settings() -> SimRegConfig:
    """Of the installation in this process."""
    return installation.regularizer().config


def begin_foreign_run(model_chunks: Any, *, micro_batch_size: int | None = None, seq_length: int | None = None) -> None:
    """For training loops other than Megatron's own: what its wrapped set-up does before the first step.

    Args:
        micro_batch_size, seq_length: of the run, so that `--simreg-impl auto` can try what is fastest on a GPU; without
            them it is tiled.

    Raises:
        RuntimeError: SimReg is not installed.
        NotImplementedError: SimReg does not reach these models.
    """
    here = installation.installed()
    if here is None:
        raise RuntimeError("SimReg is not installed: call install(config=SimRegConfig(lambda_=...)) first")
    config = here.begin_run().config
    if config.active:
        refuse_models(config, model_chunks, here.model_classes)
        if micro_batch_size and seq_length:
            forms.settle(config, model_chunks, micro_batch_size, seq_length)
        loop_hooks.begin(config, model_chunks)


def end_foreign_step(model_chunks: Any, *, reduces: bool) -> dict[str, Any]:
    """After a step; the means since the last reduction, where the ranks are asked for them all together.

    Raises:
        MegatronSeamError: SimReg is on, and no forward pass met it.
    """
    regularizer = installation.regularizer()
    if not regularizer.config.active:
        return {}
    refuse_silence(regularizer, model_chunks)
    return loop_hooks.reduced_means() if reduces else {}
