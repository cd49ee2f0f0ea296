# SPDX-License-Identifier: Apache-2.0
"""The output layer's row for each label: what a hidden state is compared with when it predicts.

Shapes: B micro-batch, T tokens of the context rank, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def label_rows(model: Any, labels: Tensor, tensor_group: dist.ProcessGroup | None) -> Tensor:
    """[T, B, D] for labels [B, T], zero for labels below 0; no gradient.

    Each tensor-parallel rank holds a part of the vocabulary and gives the rows that it has: a collective over them.
    """
    shares = bool(getattr(model, "share_embeddings_and_output_weights", False))
    weight = (model.shared_embedding_or_output_weight() if shares else model.output_layer.weight).detach()
    first = 0 if tensor_group is None else tensor_group.rank() * weight.shape[0]
    local = labels.transpose(0, 1) - first
    here = (labels.transpose(0, 1) >= 0) & (local >= 0) & (local < weight.shape[0])
    rows = weight[torch.where(here, local, 0)].masked_fill(~here.unsqueeze(-1), 0.0)
    if tensor_group is not None:
        dist.all_reduce(rows, group=tensor_group)  # one number plus zeros: exact in any type and order
    return rows
