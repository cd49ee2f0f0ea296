# SPDX-License-Identifier: Apache-2.0
"""Where SimReg's means and its time go: Megatron's log, TensorBoard with charts of its own, Weights & Biases."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.profiler import record_function

from simreg_megatron.plugin import compat

TIMER = "simreg-forward"
_CHARTS: dict[str, Callable[[str], bool]] = {
    "losses": lambda name: name.endswith(" loss"),
    "cosines": lambda name: name.endswith(" cosine"),
    "margins of predictions": lambda name: " margin" in name,
    "isotropy": lambda name: name == "simreg isotropy",
    "norms by label": lambda name: "norm difference" in name,
    "lambda": lambda name: name.endswith(" lambda"),
    "clipping": lambda name: name.startswith("adagc"),
}
"""What stands in one chart. The rest has charts of its own anyway."""

_laid_out: weakref.WeakSet[Any] = weakref.WeakSet()


def write_scalars(means: dict[str, Tensor], iteration: int) -> None:
    """To TensorBoard and Weights & Biases."""
    tensorboard, wandb = _writers()
    if tensorboard and tensorboard not in _laid_out:
        _laid_out.add(tensorboard)
        tensorboard.add_custom_scalars(charts_of(means))
    for name, value in means.items():
        if tensorboard:
            tensorboard.add_scalar(name, value, iteration)
        if wandb:
            wandb.log({name: value}, iteration)


def charts_of(names: Iterable[str]) -> dict[str, dict[str, list[Any]]]:
    """As `SummaryWriter.add_custom_scalars` takes it, each name a regular expression; language-model loss included."""
    found = {chart: [f"^{name}$" for name in names if belongs(name)] for chart, belongs in _CHARTS.items()}
    if found["losses"]:
        found["losses"].insert(0, "^lm loss$")
    return {"SimReg": {chart: ["Multiline", tags] for chart, tags in found.items() if tags}}


def _writers() -> tuple[Any, Any]:
    """TensorBoard's and Weights & Biases', on the rank where Megatron opened them; None elsewhere."""
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    return get_tensorboard_writer(), get_wandb_writer()


def logs_first_step() -> bool:
    """Whether Megatron prints a line after the first step of a process, too; from 0.16 on."""
    log = inspect.unwrap(getattr(compat.LOG_SEAM.holder(), compat.LOG_SEAM.name))
    return "is_first_iteration" in inspect.signature(log).parameters


@contextmanager
def timed() -> Iterator[None]:
    """A span in profiles and nsys; with --timing-log-level 2 one of Megatron's timers, too, which wait for the GPU."""
    timers = compat.timers()
    with record_function("SimReg forward"):
        if timers is None:
            yield
            return
        timers(TIMER, log_level=2).start()
        try:
            yield
        finally:
            timers(TIMER, log_level=2).stop()


def log_timer(args: Any, iteration: int, num_steps: int) -> None:
    """Megatron logs those timers alone that it knows by name. A collective over all ranks.

    Args:
        num_steps: since the last call, which is when the timer began anew: what is logged is the time of one.
    """
    if args.timing_log_level < 2:
        return
    timers = compat.timers()
    for writer in _writers() if args.log_timers_to_tensorboard else ():
        timers.write([TIMER], writer, iteration, normalizer=num_steps, reset=False)
    timers.log([TIMER], normalizer=num_steps)
