# SPDX-License-Identifier: Apache-2.0
"""`install()`: wrap a few functions of Megatron; `uninstall()` restores them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from simreg_megatron import notices
from simreg_megatron.config import SimRegConfig
from simreg_megatron.config.flags import refuse_idle_settings
from simreg_megatron.cpu.installed import without_make
from simreg_megatron.plugin import compat, installation, log, loop, model
from simreg_megatron.plugin.installation import Installation, Wrapper

_AROUND_LOOP: tuple[tuple[compat.Seam, Wrapper], ...] = (
    (compat.HELPERS_SEAM, lambda compile_helpers: without_make(compile_helpers)()),
    (compat.SETUP_SEAM, loop.set_up),
    (compat.STEP_SEAM, loop.count_steps),
    (compat.LOG_SEAM, log.report),
)
_WITH_FLAGS: tuple[tuple[compat.Seam, Wrapper], ...] = (
    (compat.ARGUMENTS_SEAM, loop.add_flags),
    (compat.RESUME_SEAM, loop.compare_with_checkpoint),
    (compat.SCHEDULER_SEAMS[0], loop.save_adagc),
    (compat.SCHEDULER_SEAMS[1], loop.load_adagc),
)


def install(config: SimRegConfig | None = None, models: Any = None) -> None:
    """Wrap Megatron's functions; see `simreg_megatron.install`."""
    existing = installation.installed()
    notices.refuse(
        (existing is not None and existing.given_config != config,
         "SimReg is installed with other settings already: call uninstall() first"),
        (models is not None and config is None,
         "models are checked against settings: pass both, install(config=..., models=...)"),
    )  # fmt: skip
    if config is not None and existing is None:
        refuse_idle_settings(config)
    try:
        if existing is None:
            _install(config)
        if models is not None:
            loop.begin_run(models)
    except BaseException:  # all of it or nothing
        if existing is None:
            uninstall()
        raise


def seams_to_wrap(*, with_flags: bool) -> list[tuple[compat.Seam, Wrapper]]:
    """List the functions of this Megatron that are wrapped, each with its wrapper."""
    seams: list[tuple[compat.Seam, Wrapper]] = []
    for seam in compat.model_seams():
        joins = "parameters that an objective trains join the model"
        seams.append((replace(seam, name="__init__", parameters=frozenset(), purpose=joins), model.prepare))
        if seam in compat.FORWARD_SEAMS:
            seams.append((seam, model.regularize_forward))
        else:
            bypass = "a forward pass that bypasses it is an error"
            seams.append((seam, model.regularize))
            seams.append((replace(seam, name="forward", parameters=frozenset(), purpose=bypass), model.check_forward))
    seams += [(seam, model.keep_loss_mask) for seam in compat.mask_seams()]
    if compat.has_training_loop():
        seams += (*_AROUND_LOOP, *_WITH_FLAGS) if with_flags else _AROUND_LOOP
    return seams


def _install(config: SimRegConfig | None) -> None:
    compat.FORWARD_SEAMS[0].holder()  # a MegatronSeamError without any Megatron
    if config is None and not compat.has_training_loop():
        raise compat.MegatronSeamError(
            f"megatron-core {compat.megatron_version()} has no megatron.training to parse the --simreg-* flags: call "
            "install(config=SimRegConfig(lambda_=...)), or put a Megatron-LM source tree on PYTHONPATH"
        )
    if config is None and compat.arguments() is not None and not hasattr(compat.arguments(), "simreg_lambda"):
        raise RuntimeError(
            "Megatron has parsed its flags already, without those of SimReg: call install() before, or pass the "
            "settings, install(config=SimRegConfig(lambda_=...))"
        )
    seams = seams_to_wrap(with_flags=config is None)
    new = Installation(config, model.catch_inner_states)
    installation.set_current(new)
    new.model_classes = tuple(seam.holder() for seam in compat.model_seams())
    for seam, wrapper in seams:  # if one is missing, `install` restores the others
        new.wrap(seam.holder(), seam.name, wrapper)
    if compat.is_untried_release():
        notices.warn(
            f"SimReg has not been tried with megatron-core {compat.megatron_version()}. It continues, as all functions "
            "that it wraps exist; first compare a short run with --simreg-lambda 0 to one without the plugin"
        )
    if config is not None and new.regularizer().config.active:
        model.watch_built(new.model_classes)


def uninstall() -> None:
    """Restore every wrapped function; see `simreg_megatron.uninstall`."""
    existing = installation.installed()
    if existing is not None:
        existing.unwrap_all()
        if existing.clipping is not None:
            existing.clipping.detach()
        installation.set_current(None)
        notices.forget()
