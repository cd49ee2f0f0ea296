# SPDX-License-Identifier: Apache-2.0
"""Raise an error when a model's training forward pass bypasses SimReg, instead of silently training without it.

Megatron's own loop checks this after each step. Other loops do not, and their models may override or replace the
wrapped functions; so each model is checked at the end of its forward pass.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from simreg_megatron.plugin import compat, installation

WAY_OUT = "or set --simreg-lambda 0 (docs/ecosystem.md explains SimReg in other frameworks)"


def watch(model: Any) -> None:
    """Ask this model after each of its forward passes, whatever function computes it."""
    if refuse_bypass not in model._forward_hooks.values():
        installation.current().watches.append(model.register_forward_hook(refuse_bypass))


def watch_built(classes: tuple[type, ...]) -> None:
    """Those that were built before `install()`, too."""
    for known in gc.get_objects():
        if issubclass(type(known), classes):
            watch(known)


def ask_after(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Also models whose `forward` is called without their hooks."""

    def asked(model: Any, *args: Any, **kwargs: Any) -> Any:
        installation.current().passed.discard(model)
        found = forward(model, *args, **kwargs)
        _refuse_bypass(model)
        return found

    return asked


def refuse_bypass(model: Any, *_: Any) -> None:
    """After a forward pass.

    Raises:
        NotImplementedError: it was one of training, and did not pass SimReg.
    """
    if installation.installed() is not None:
        _refuse_bypass(model)
        installation.current().passed.discard(model)


def _refuse_bypass(model: Any) -> None:
    here = installation.current()
    trains = model.training and torch.is_grad_enabled() and getattr(model, "post_process", True) and not here.paused
    if trains and model not in here.passed and here.regularizer().config.active:
        raise NotImplementedError(
            f"this {type(model).__name__} ended a training forward pass without calling the function that SimReg "
            f"wraps, {compat.MODEL_SEAM.path}{_own_function(model)}: make it call that function, {WAY_OUT}"
        )


def _own_function(model: Any) -> str:
    """Which function lies over it, as far as that can be told."""
    known = installation.current().model_classes
    for name in (compat.MODEL_SEAM.name, "forward"):
        if name in vars(model):
            return f", but has a {name} of its own"
        owner = next((kind for kind in type(model).__mro__ if name in vars(kind)), None)
        if owner is not None and owner not in known:
            return f", but {owner.__name__} overrides {name}"
    return ""
