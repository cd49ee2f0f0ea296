# SPDX-License-Identifier: Apache-2.0
"""SimReg's means in Megatron's log, TensorBoard and Weights & Biases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from simreg_megatron.config import SimRegConfig
from simreg_megatron.notices import say
from simreg_megatron.parallel.metrics import add_to_console, left_out_of_console
from simreg_megatron.parallel.sequence import fast_impl
from simreg_megatron.plugin import compat, installation
from simreg_megatron.plugin.tokens import device_of, rows_dtype


def described(config: SimRegConfig, model: Any) -> str:
    """Describe the settings of one objective, for the first lines of the log."""
    settings = ["measured only, in log steps, not trained on"]
    if config.trains:
        asked = " (auto)" if config.lambda_ == "auto" else ""
        settings = [f"lambda {config.weight(model.config.hidden_size):g}{asked} {config.schedule}".strip()]
    if config.every > 1:
        settings.append(f"once every {config.every} steps with {config.every} times the weight (another objective)")
    if config.by_sequence or not config.sends_no_rows:
        settings.append(f"temperature {config.tau:g}")
    if config.by_sequence or config.has_chunks:
        is_cut = config.chunk_size and not config.by_sequence
        settings.append(f"chunks of {config.chunk_size} tokens" if is_cut else "whole sequences")
    if not config.sends_no_rows:
        like = torch.empty(0, dtype=rows_dtype(config, model), device=device_of([model]))
        settings += [f"scope {config.scope}", f"impl {fast_impl(config, like) or 'reference'}"]
    settings += [f"{name} {value}" for name, value in config.objective_options if value != "whole"]
    name = "SimReg" if config.objective in ("simreg", "none") else f"SimReg objective {config.objective}"
    return f"{name}: {', '.join(settings)}"


def is_log_step(iteration: int) -> bool:
    return iteration % (installation.regularizer().config.log_interval or compat.arguments().log_interval) == 0


def report(training_log: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call Megatron's `training_log`: SimReg's and AdaGC's means join its line."""
    arguments = compat.named_arguments(training_log, *args, **kwargs)
    iteration, logs = arguments["iteration"], is_log_step(arguments["iteration"])
    first = bool(arguments.get("is_first_iteration")) and not logs  # a line of its own, in the middle of an interval
    state = installation.current()
    if not (first or logs) or not (state.regularizer().config.active or state.clipping):
        return training_log(*args, **kwargs)
    total_loss_dict = arguments["total_loss_dict"]
    means = reduced_means(reset=not first) if state.regularizer().config.active else {}
    if state.clipping is not None:
        means |= state.clipping.means(reset=not first)
    add_to_console(means, total_loss_dict, skipped=bool(arguments["skipped_iter"]))
    if not first:
        write_scalars(means, iteration)
    result = training_log(*args, **kwargs)
    if left_out := left_out_of_console(means):
        say(f"SimReg at iteration {iteration}, next to Megatron's line, which has no numbers below 0: {left_out}")
    for name in means:  # interval means, not sums: Megatron must not go on adding to them
        total_loss_dict.pop(name, None)
    return result


def reduced_means(model: Any = None, *, reset: bool = True) -> dict[str, Tensor]:
    """Reduce the means over the ranks that saw SimReg, a collective; what is only measured is gone afterwards."""
    regularizer, group = installation.regularizer(), compat.data_group(model, with_context=True)
    means = regularizer.metrics.reduce(group, reset=reset or not regularizer.trains_now)
    return means | regularizer.lambdas() if means else {}


def write_scalars(means: dict[str, Tensor], iteration: int, writers: tuple[Any, Any] | None = None) -> None:
    """Write the means to TensorBoard and Weights & Biases: `writers`, None on ranks without them, or Megatron's."""
    if writers is None:
        from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

        writers = get_tensorboard_writer(), get_wandb_writer()
    tensorboard, wandb = writers
    for name, value in means.items():
        if tensorboard is not None:
            tensorboard.add_scalar(name, value, iteration)
        if wandb is not None:
            wandb.log({name: float(value)}, iteration)
