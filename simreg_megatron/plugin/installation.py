# SPDX-License-Identifier: Apache-2.0
"""The state that all wrappers share: what is wrapped in this process, and with which settings."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from simreg_megatron.adagc.clipping import Clipping
from simreg_megatron.config import SimRegConfig
from simreg_megatron.config.flags import config_from_args
from simreg_megatron.plugin import compat
from simreg_megatron.plugin.term import Regularizer

Wrapper = Callable[..., Any]  # given the original function and the arguments of a call, it calls the original


class Installation:
    """The settings, the wrapped functions, and the models that have passed them.

    Without `config` the settings are Megatron's flags, once these are parsed. `decoder_wrapper` wraps the decoder's
    `forward` if the settings name states inside it.
    """

    def __init__(self, config: SimRegConfig | None, decoder_wrapper: Wrapper) -> None:
        self.given_config = config
        self.clipping: Clipping | None = None
        self.paused = False  # while true, models train as plain Megatron trains them
        self.model_classes: tuple[Any, ...] = ()
        self.had_labels: weakref.WeakSet[Any] = weakref.WeakSet()  # models that have computed a loss with labels
        self.called: weakref.WeakSet[Any] = weakref.WeakSet()  # whose forward pass called a wrapped function
        self.inside: weakref.WeakSet[Any] = weakref.WeakSet()  # that are inside a wrapped function now
        self.loss_masks: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        """Loss mask by language model inside another model, which may not pass it on; None once it is used."""
        self.watches: list[Any] = []  # handles of the hooks on models
        self._decoder_wrapper = decoder_wrapper
        self._regularizer: Regularizer | None = None
        self._originals: list[tuple[Any, str, Any, Any]] = []  # holder, name, Megatron's function, ours
        self._is_uninstalled = False

    def regularizer(self) -> Regularizer:
        """Return the regularizer, made at first use: Megatron's flags are parsed by then."""
        if self._regularizer is None:
            config = self.given_config or config_from_args(compat.arguments())
            self._regularizer = Regularizer(config)
            if config.active and config.looks_inside:
                self.wrap(compat.DECODER_SEAM.holder(), compat.DECODER_SEAM.name, self._decoder_wrapper)
        return self._regularizer

    def begin_run(self) -> Regularizer:
        """Make a new regularizer: a run that Megatron restarts inside the process has new groups and counts from 0."""
        self._regularizer = None
        return self.regularizer()

    def wrap(self, holder: Any, name: str, wrapper: Wrapper) -> None:
        """Wrap a function once. A wrapper that is still held after `uninstall()` calls the original."""
        if any(entry[:2] == (holder, name) for entry in self._originals):
            return
        original = getattr(holder, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if self._is_uninstalled else wrapper(original, *args, **kwargs)

        setattr(holder, name, wrapped)
        self._originals.append((holder, name, original, wrapped))

    def unwrap_all(self) -> None:
        """Restore all functions, or none: RuntimeError if one was wrapped again since."""
        for holder, name, _, wrapped in self._originals:
            if getattr(holder, name) is not wrapped:
                raise RuntimeError(
                    f"{getattr(holder, '__name__', holder)}.{name} was wrapped again after SimReg: undo that first"
                )
        for holder, name, original, _ in self._originals:
            setattr(holder, name, original)
        self._is_uninstalled = True
        for watch in self.watches:
            watch.remove()


_installation: Installation | None = None


def installed() -> Installation | None:
    return _installation


def current() -> Installation:
    """Return the installation of this process; RuntimeError without one."""
    if _installation is None:
        raise RuntimeError("SimReg is not installed: call install(config=SimRegConfig(lambda_=...)) first")
    return _installation


def set_current(new: Installation | None) -> None:
    global _installation
    _installation = new


def regularizer() -> Regularizer:
    return current().regularizer()
