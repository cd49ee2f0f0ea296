# SPDX-License-Identifier: Apache-2.0
"""Where SimReg's means go: Megatron's log line, TensorBoard with charts of its own, Weights & Biases."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from simreg_megatron.measures import charts

QUANTILES = {f"simreg margin {share:.0%}": share for share in (0.1, 0.5, 0.9)}
_NOT_IN_CONSOLE = (  # Megatron's line is long enough
    "simreg norm difference",
    "simreg norm difference of rare labels",
    "simreg norm difference of right predictions",
    "simreg radial gradient",
    "simreg effective rank",
    "simreg mean cosine",
    "simreg margin of right predictions",
    *QUANTILES,
)
_laid_out: weakref.WeakSet[Any] = weakref.WeakSet()


def add_to_console(means: dict[str, Tensor], total_loss_dict: dict[str, Any], *, skipped: bool) -> None:
    """Put interval means where `training_log` prints its own: it divides every entry by the advanced iterations.

    Some are for TensorBoard and Weights & Biases alone.
    """
    advanced = total_loss_dict.get("advanced iterations", 0) + (0 if skipped else 1)
    for name, value in means.items():
        if name not in _NOT_IN_CONSOLE:
            total_loss_dict[name] = value * max(1, advanced)


def write_scalars(means: dict[str, Tensor], iteration: int) -> None:
    """TensorBoard and Weights & Biases, on the rank where Megatron opened them."""
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    if tensorboard and tensorboard not in _laid_out:
        _laid_out.add(tensorboard)
        tensorboard.add_custom_scalars(charts.layout(means))
    for name, value in means.items():
        if tensorboard:
            tensorboard.add_scalar(name, value, iteration)
        if wandb:
            wandb.log({name: value}, iteration)
