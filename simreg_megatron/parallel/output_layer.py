# SPDX-License-Identifier: Apache-2.0
"""The output layer: its row for each label, and by how much a hidden state predicts its label.

Shapes: B micro-batch, T tokens of the context rank, N tokens, D hidden, V this rank's part of the vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from simreg_megatron.parallel.collectives import gather

_STATES_AT_ONCE = 512  # so that their logits, over a large vocabulary, stay small next to those of a training step


@torch.no_grad()
def label_rows(model: Any, labels: Tensor, tensor_group: dist.ProcessGroup | None) -> Tensor:
    """Return the output layer's rows [T, B, D] for labels [B, T], zero for labels below 0; no gradient.

    Each tensor-parallel rank holds a part of the vocabulary and gives the rows that it has: a collective over them.
    """
    weight = head_weight(model).detach()
    local, is_here = rows_in_shard(labels.transpose(0, 1), weight, tensor_group)
    rows = weight[torch.where(is_here, local, 0)].masked_fill(~is_here.unsqueeze(-1), 0.0)
    if tensor_group is not None:
        dist.all_reduce(rows, group=tensor_group)  # one number plus zeros: exact in any type and order
    return rows


def has_whole_head(model: Any) -> bool:
    """Return whether the output layer's rows are here: FSDP scatters them between uses, other models may have none."""
    if getattr(model, "output_layer", None) is None or is_cut_up(model):
        return False
    weight = head_weight(model)
    held = 0 if isinstance(weight, DTensor) else weight.untyped_storage().nbytes()
    return weight.numel() > 0 and held >= weight.numel() * weight.element_size()


def is_cut_up(model: Any) -> bool:
    """Return whether the weight is only a shard, which Megatron gathers inside its own matrix product alone."""
    weight = None if getattr(model, "output_layer", None) is None else head_weight(model)
    return bool(getattr(weight, "is_gtp_weight_remat", False))


def refuse_second_use(model: Any, objective: str) -> None:
    """Raise if the output layer cannot be trained by a second use of its weight in the same step."""
    reasons = []
    if not has_whole_head(model) or getattr(head_weight(model), "__fsdp_param__", False):
        reasons.append("the output layer's weight is not whole on its rank")
    if getattr(model.config, "defer_embedding_wgrad_compute", False):
        reasons.append("--defer-embedding-wgrad-compute takes its gradient apart from the step's backward")
    if getattr(model.config, "fp8_output_proj", False):
        reasons.append("--fp8-output-proj computes the logits in another type")
    if reasons:
        how = "change that, or choose another one"
        raise NotImplementedError(f"SimReg objective {objective} does not work here, as {reasons[0]}: {how}")


@torch.no_grad()
def margins(model: Any, states: Tensor, labels: Tensor, tensor_group: dist.ProcessGroup | None) -> Tensor:
    """Compute m_i = z_{i, y_i} - max_{j != y_i} z_{i, j} of the logits z: float32 [N], above 0 if y_i is predicted.

    Logits are taken in the type of the weights, as the model takes them, so in bfloat16 some tie: a margin of 0.
    Tensor-parallel ranks hold parts of the vocabulary and each brings its own N states: a collective over them.

    Args:
        states: [N, D], what enters the output layer; N, which may be 0, is the same on all ranks of the group.
        labels: int64 [N]; one below 0 is never predicted: -inf.

    Source: arXiv 2605.08809, before its Lemma 1.
    """
    head, number = head_of(model), len(labels)
    if tensor_group is not None:
        states, labels = (gather(part, tensor_group) for part in (states, labels))
    local, is_here = rows_in_shard(labels, head.weight, tensor_group)
    tiles = []
    for tile in (slice(first, first + _STATES_AT_ONCE) for first in range(0, max(1, len(states)), _STATES_AT_ONCE)):
        logits = head.unscaled(states[tile])
        index, absent = torch.where(is_here, local, 0)[tile].unsqueeze(1), ~is_here[tile].unsqueeze(1)
        label_logit = logits.gather(1, index)
        logits.scatter_(1, index, torch.where(absent, label_logit, -torch.inf))
        tiles.append(torch.stack([label_logit.masked_fill_(absent, -torch.inf).squeeze(1), logits.amax(dim=1)]).float())
    best = torch.cat(tiles, dim=1)  # the label's logit, or -inf if its row is on another rank; the largest other one
    if tensor_group is not None:
        dist.all_reduce(best, op=dist.ReduceOp.MAX, group=tensor_group)
    first = 0 if tensor_group is None else tensor_group.rank() * number
    return ((best[0] - best[1]) * head.scale)[first : first + number]


def rows_in_shard(labels: Tensor, weight: Tensor, tensor_group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Return each label's row in this rank's shard of the vocabulary, and whether it is there (never below 0)."""
    first = 0 if tensor_group is None else tensor_group.rank() * weight.shape[0]
    local = labels - first
    return local, (labels >= 0) & (local >= 0) & (local < weight.shape[0])


def head_weight(model: Any) -> Tensor:
    """Return the output layer's weight, which may be that of the embeddings."""
    shares = bool(getattr(model, "share_embeddings_and_output_weights", False))
    weight: Tensor = model.shared_embedding_or_output_weight() if shares else model.output_layer.weight
    return weight


class Head(NamedTuple):
    """The output layer."""

    weight: Tensor  # [V, D], the parameter itself
    bias: Tensor | None = None  # [V], where the layer has one
    scale: float = 1.0  # what the model multiplies its logits with

    def unscaled(self, rows: Tensor, width: int | None = None) -> Tensor:
        """Compute [n, V] from the first `width` features of rows [n, D], in the type of the weights, as the model."""
        logits = rows[:, :width].to(self.weight.dtype) @ self.weight[:, :width].mT
        return logits if self.bias is None else logits + self.bias


def head_of(model: Any) -> Head:
    layer, settings = model.output_layer, getattr(model, "config", None)
    bias = None if getattr(layer, "skip_bias_add", False) else getattr(layer, "bias", None)
    scale = float(settings.mup_output_mult) if settings and getattr(settings, "use_mup", False) else 1.0
    return Head(head_weight(model), bias, scale)
