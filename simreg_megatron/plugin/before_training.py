# SPDX-License-Identifier: Apache-2.0
"""What every training loop, Megatron's own or another, does before its first step, once nothing speaks against it."""

from __future__ import annotations

from typing import Any

from simreg_megatron.notices import log_once
from simreg_megatron.plugin import announce, form_trial, whole_graph
from simreg_megatron.plugin.regularizer import Regularizer


def make_ready(
    regularizer: Regularizer, model_chunks: Any, settings: Any, micro_batch_size: int | None, seq_length: int | None
) -> None:
    """Follow a captured step, take the fastest implementation where the shapes are known, and say what is on.

    Args:
        settings: Megatron's flags, or in other loops the configuration of the model.
    """
    if whole_graph.is_asked_for(settings):
        regularizer.repeat_one_step()
        log_once(f"SimReg: no geometry is measured with {whole_graph.FLAG}; the log has its loss and lambda")
    if micro_batch_size and seq_length:
        form_trial.settle(regularizer.config, model_chunks, micro_batch_size, seq_length)
    announce.begin(regularizer.config, model_chunks)
