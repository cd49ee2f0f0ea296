# SPDX-License-Identifier: Apache-2.0
"""The two trained scalars of `--simreg-similarity learnable`, as parameters of the model that computes the loss.

Megatron's own machinery then does the rest: its optimizer steps on them (without weight decay, as on every vector), its
data parallelism averages their gradients, its checkpoints keep them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from simreg_megatron.parallel.collectives import share_work

NAME = "simreg_similarity"


class Exponents(nn.Module):
    """Zero at the start: half a power of each norm is divided out."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(1))
        self.key = nn.Parameter(torch.zeros(1))


def add_to(model: Any) -> None:
    """Give a model of the last pipeline stage its scalars."""
    if getattr(model, "post_process", True) and not hasattr(model, NAME):
        setattr(model, NAME, Exponents())


def exponents_of(model: Any, tensor_group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """The scalars in float32. Tensor-parallel ranks compute different anchors, so their gradients are summed."""
    own: Exponents | None = getattr(model, NAME, None)
    if own is None:
        raise RuntimeError(
            "--simreg-similarity learnable came after the model was built: install the plugin before, or choose another"
        )
    if tensor_group is None:
        return own.query.float(), own.key.float()
    return share_work(own.query, tensor_group), share_work(own.key, tensor_group)
