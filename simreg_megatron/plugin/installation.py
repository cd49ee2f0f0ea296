# SPDX-License-Identifier: Apache-2.0
"""What is wrapped in this process, and with which settings: the state that all hooks share."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from simreg_megatron.adagc.clipping import Clipping
from simreg_megatron.config import SimRegConfig
from simreg_megatron.config.flags import config_from_args, refuse_idle_adagc, refuse_idle_flags
from simreg_megatron.plugin import compat
from simreg_megatron.plugin.regularizer import Regularizer

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
InnerWrappers = Callable[[SimRegConfig], Iterable[tuple[compat.Seam, Wrapper]]]
"""What is wrapped inside the decoder, for settings that ask for it."""


class Installation:
    """What is wrapped in this process, and with which settings."""

    def __init__(self, config: SimRegConfig | None, inside: InnerWrappers) -> None:
        self.given_config = config
        self._inside = inside
        self._regularizer: Regularizer | None = None
        self.clipping: Clipping | None = None
        self.checkpoint_config: SimRegConfig | None = None
        """Of the run that wrote the checkpoint, once Megatron has read its arguments."""
        self.paused = False
        """While true, models train as plain Megatron trains them."""
        self.met: weakref.WeakSet[Any] = weakref.WeakSet()
        """Models whose loss came by."""
        self.passed: weakref.WeakSet[Any] = weakref.WeakSet()
        """Models whose forward pass, the one that runs or the last, passed a wrapped function."""
        self.entered: weakref.WeakSet[Any] = weakref.WeakSet()
        """Models that are inside a wrapped function now."""
        self.watches: list[Any] = []
        """Handles of the hooks on models."""
        self._originals: list[tuple[Any, str, Any, Any]] = []
        self.model_classes: tuple[Any, ...] = ()
        self._over = False

    def regularizer(self) -> Regularizer:
        """Made at first use: Megatron's flags are parsed by then."""
        if self._regularizer is None:
            self._regularizer = Regularizer(self.given_config or _config_of_megatron())
            self._look_inside_if_asked(self._regularizer.config)
        return self._regularizer

    def begin_run(self) -> Regularizer:
        """A fresh regularizer: a run that Megatron restarts inside the process has new groups and counts anew."""
        self._regularizer = None
        return self.regularizer()

    def _look_inside_if_asked(self, config: SimRegConfig) -> None:
        """The decoder is wrapped only for settings that name states inside it."""
        if not (config.active and config.looks_inside):
            return
        for seam, wrapper in self._inside(config):
            self.wrap(seam.holder(), seam.name, wrapper)

    def wrap(self, holder: Any, name: str, wrapper: Wrapper) -> None:
        """Once: nothing is done where it is wrapped already. Whoever keeps the wrapper has the original after
        `uninstall()`."""
        if any(holder is known and name == of_it for known, of_it, _, _ in self._originals):
            return
        original = getattr(holder, name)
        with_simreg = wrapper(original)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return (original if self._over else with_simreg)(*args, **kwargs)

        setattr(holder, name, wrapped)
        self._originals.append((holder, name, original, wrapped))

    def unwrap_all(self) -> None:
        """All of them, or none where someone wrapped one again since."""
        for holder, name, _, wrapped in self._originals:
            if getattr(holder, name) is not wrapped:
                raise RuntimeError(
                    f"{getattr(holder, '__name__', holder)}.{name} was wrapped again after SimReg: undo that first"
                )
        while self._originals:
            holder, name, original, _ = self._originals.pop()
            setattr(holder, name, original)
        self._over = True
        while self.watches:
            self.watches.pop().remove()


_installation: Installation | None = None


def installed() -> Installation | None:
    return _installation


def current() -> Installation:
    """RuntimeError without one."""
    if _installation is None:
        raise RuntimeError("SimReg is not installed: call install(config=SimRegConfig(lambda_=...)) first")
    return _installation


def keep(new: Installation | None) -> None:
    """Of now on; None is none."""
    global _installation
    _installation = new


def regularizer() -> Regularizer:
    return current().regularizer()


def known_config() -> SimRegConfig | None:
    """None without settings where Megatron does not know its own yet."""
    if current().given_config is None and not compat.has_parsed_arguments():
        return None
    return regularizer().config


def clipping_in_force() -> Clipping | None:
    return None if _installation is None else _installation.clipping


def _config_of_megatron() -> SimRegConfig:
    args = compat.arguments()
    config = config_from_args(args)
    refuse_idle_flags(args, config)  # those of a YAML file have met no parser of ours
    refuse_idle_adagc(args)
    return config
