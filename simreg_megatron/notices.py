# SPDX-License-Identifier: Apache-2.0
"""Log messages once, on one rank."""

from __future__ import annotations

import warnings

import torch.distributed as dist

_said: set[str] = set()


def log_once(message: str) -> None:
    """Say it once in a run, on the rank whose console Megatron's training log uses."""
    if message in _said:
        return
    _said.add(message)
    say(message)


def forget() -> None:
    """Forget what was logged, since a new run begins in this process, or SimReg was uninstalled."""
    _said.clear()


def say(message: str) -> None:
    """Log on the rank whose console Megatron's training log uses."""
    ready = dist.is_available() and dist.is_initialized()
    if not ready or dist.get_rank() == dist.get_world_size() - 1:
        print(f"> {message}", flush=True)


def warn(message: str) -> None:
    """A warning on the first rank."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        warnings.warn(message, stacklevel=3)
