# SPDX-License-Identifier: Apache-2.0
"""What every training loop does before its first step: follow a captured step, choose the kernels, say what is on."""

from __future__ import annotations

from typing import Any

from simreg_megatron.config import SimRegConfig
from simreg_megatron.notices import log_once, warn
from simreg_megatron.plugin import compat, form_trial, inner, whole_graph
from simreg_megatron.plugin.regularizer import Regularizer
from simreg_megatron.plugin.tokens import open_row_group
from simreg_megatron.sharded.sequence import fast_form


def make_ready(
    regularizer: Regularizer, model_chunks: Any, settings: Any, micro_batch_size: int | None, seq_length: int | None
) -> None:
    """Follow a captured step, take the fastest kernels where the shapes are known, and print a line an objective.

    Args:
        settings: Megatron's flags, or in other loops the configuration of the model.
    """
    if whole_graph.is_asked_for(settings):
        regularizer.repeat_one_step()
        log_once(f"SimReg: no geometry is measured with {whole_graph.FLAG}; the log has its loss and lambda")
    if micro_batch_size and seq_length:
        form_trial.settle(regularizer.config, model_chunks, micro_batch_size, seq_length)
    for model in compat.unwrapped(model_chunks):
        if getattr(model, "post_process", True) or inner.holds_earlier_layers(regularizer.config, model):
            open_row_group(model)
    for part in regularizer.config.parts:
        _announce(part, model_chunks)


def _announce(config: SimRegConfig, model_chunks: Any) -> None:
    from megatron.core.utils import get_model_config

    hidden_size = get_model_config(model_chunks[0]).hidden_size
    asked = " (auto)" if config.lambda_ == "auto" else ""
    changes = f" {config.schedule}" if str(config.schedule) else ""
    if config.every > 1:
        changes += f", once every {config.every} steps with {config.every} times the weight (another objective)"
    what = (
        f"lambda {config.weight(hidden_size):g}{asked}{changes}"
        if config.trains
        else "measured only, in log steps, not trained on"
    )
    options = "".join(f", {name} {value}" for name, value in config.objective_options if value != "whole")
    warning = config.record.warning(config)
    if warning:
        warn(f"SimReg objective {config.objective}: {warning}")
    if config.by_sequence:
        log_once(f"SimReg objective {config.objective}: {what}, temperature {config.tau:g}, whole sequences{options}")
        return
    chunk = f"chunks of {config.chunk_size} tokens" if config.chunk_size else "whole sequences"
    if config.through_head or config.sums_up:
        chunk = f", {chunk}" if config.has_chunks else ""
        log_once(f"SimReg objective {config.objective}: {what}{chunk}{options}")
        return
    name = "SimReg" if config.objective in ("simreg", "none") else f"SimReg objective {config.objective}"
    impl = fast_form(config, form_trial.rows_like(config, compat.unwrapped(model_chunks)[0])) or "reference"
    log_once(f"{name}: {what}, temperature {config.tau:g}, {chunk}, scope {config.scope}, impl {impl}{options}")
