# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints of random weights, without Megatron."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from simreg_megatron.checkpoint.architecture import Architecture
from simreg_megatron.checkpoint.dist_writer import write
from simreg_megatron.checkpoint.weights import Weight

DENSE = Architecture(
    num_layers=2, hidden=16, num_heads=4, num_groups=2, head_size=4, ffn=12, vocabulary=10, is_tied=False,
    norm_epsilon=1e-5, max_positions=32, rope_base=10000.0,
)  # fmt: skip
EXPERTS = replace(DENSE, num_experts=4, experts_per_token=2)


def transformers_release() -> int:
    """4 or 5: they name settings of a model and ways of a tokenizer differently."""
    return int(metadata.version("transformers").split(".")[0])


def random_weights(architecture: Architecture, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """By canonical name; no two numbers alike, so that nothing can be exchanged unseen."""
    generator = torch.Generator().manual_seed(11)
    shapes = architecture.shapes(architecture.vocabulary)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes}


def as_weights(tensors: dict[str, Tensor]) -> dict[str, Weight]:
    return {name: Weight(tuple(t.shape), t.dtype, partial(t.clone)) for name, t in tensors.items()}


def dist_checkpoint(folder: Path, architecture: Architecture = DENSE) -> Path:
    """A `torch_dist` checkpoint, as the importer writes it."""
    folder.mkdir(parents=True)
    write(folder, architecture, as_weights(random_weights(architecture)))
    return folder


class Calls:
    """Pickles as a call of any function: what a malicious checkpoint is made of."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call
