# SPDX-License-Identifier: Apache-2.0
"""Write a Hugging Face LLaMA or Mixtral as a Megatron checkpoint, to continue pretraining from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from simreg_megatron.checkpoint.appearing import appearing
from simreg_megatron.checkpoint.dist_writer import write
from simreg_megatron.checkpoint.errors import CheckpointError
from simreg_megatron.checkpoint.hf_folder import HuggingFaceModel
from simreg_megatron.checkpoint.source import TRACKER

_RELEASE = "release"  # Megatron's own word for weights without an optimizer and without a step


def import_model(
    model: HuggingFaceModel, save: Path, *, progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Make the folder `save` for Megatron's --load, in any layout of ranks. It appears only when it is whole.

    Raises:
        CheckpointError: `save` is taken, or Megatron has no place for a number of the model.
    """
    architecture = model.architecture
    if architecture.rope_base != int(architecture.rope_base):
        raise CheckpointError(f"its rotary base is {architecture.rope_base}, and Megatron takes whole numbers only")
    with appearing(save) as folder:
        (folder / _RELEASE).mkdir()
        write(folder / _RELEASE, architecture, model.weights, progress=progress)
        (folder / TRACKER).write_text(_RELEASE)
