# SPDX-License-Identifier: Apache-2.0
"""Things to break on purpose inside a run; named by SIMREG_RECORD_PATCH."""

from __future__ import annotations

from typing import Any

import torch


def not_finite_from_second_step() -> None:
    """SimReg's terms become NaN in the second step, while the language-model loss stays sound."""
    from simreg_megatron.plugin import regularizer

    sound, calls = regularizer.simreg_loss, []

    def broken(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(None)
        terms = sound(*args, **kwargs)
        return terms * float("nan") if len(calls) > 2 else terms  # two micro-batches a step

    regularizer.simreg_loss = broken


def not_finite_hidden_states() -> None:
    """The last norm emits NaN: the language-model loss is lost too, and Megatron's own check speaks."""
    from megatron.core.transformer.transformer_block import TransformerBlock

    forward = TransformerBlock.forward
    TransformerBlock.forward = lambda self, *args, **kwargs: forward(self, *args, **kwargs) * float("nan")


def other_model_class() -> None:
    """A model that never passes through the wrapped function."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    from simreg_megatron.plugin import hooks

    class HybridModel(torch.nn.Module):
        post_process = True

    refuse = hooks._refuse_models
    hooks._refuse_models = lambda chunks: refuse([HybridModel()])
    assert GPTModel is not HybridModel
