# SPDX-License-Identifier: Apache-2.0
"""The output layer: its row for each label, by how much a hidden state predicts its label, and losses through a part.

Shapes: B micro-batch, T tokens of the context rank, N states, D hidden, V this rank's part of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from simreg_megatron.config import SimRegConfig
from simreg_megatron.losses.prefixes_ce import default_prefixes
from simreg_megatron.parallel.collectives import gather, gather_rows, share_work, wide
from simreg_megatron.parallel.shard import SequenceShard
from simreg_megatron.parallel.truncated_head import TruncatedHead, truncated_head_losses

_TERMS = {"prefixes-ce": lambda losses: losses, "z-loss": torch.square}
"""The term of a token, from its cross-entropy or its normalizer."""
_STATES_AT_ONCE = 512  # so that their logits, over a large vocabulary, stay small next to those of a training step


@torch.no_grad()
def label_rows(model: Any, labels: Tensor, tensor_group: dist.ProcessGroup | None) -> Tensor:
    """Return the output layer's rows [T, B, D] for labels [B, T], zero for labels below 0; no gradient.

    Each tensor-parallel rank holds a part of the vocabulary and gives the rows that it has: a collective over them.
    """
    weight = _weight(model).detach()
    local, here = _rows_in_shard(labels.transpose(0, 1), weight, tensor_group)
    rows = weight[torch.where(here, local, 0)].masked_fill(~here.unsqueeze(-1), 0.0)
    if tensor_group is not None:
        dist.all_reduce(rows, group=tensor_group)  # one number plus zeros: exact in any type and order
    return rows


def has_whole_head(model: Any) -> bool:
    """Return whether the output layer's rows are here: FSDP scatters them between uses, other models may have none."""
    if getattr(model, "output_layer", None) is None or is_cut_up(model):
        return False
    weight = _weight(model)
    held = 0 if isinstance(weight, DTensor) else weight.untyped_storage().nbytes()
    return weight.numel() > 0 and held >= weight.numel() * weight.element_size()


def is_cut_up(model: Any) -> bool:
    """Return whether the weight is only a shard, which Megatron gathers inside its own matrix product alone."""
    weight = None if getattr(model, "output_layer", None) is None else _weight(model)
    return bool(getattr(weight, "is_gtp_weight_remat", False))


def head_terms(
    config: SimRegConfig, model: Any, hidden_states: Tensor, labels: Tensor, valid: Tensor, shard: SequenceShard
) -> Tensor:
    """Compute the objective's term of each anchor from its logits, [B, A]; 0 where a token does not count.

    Its terms are made of each token's cross-entropy through the output layer, truncated to prefixes where it has these;
    or of the normalizer log sum_j exp z_ij, where it uses no labels.

    Every tensor-parallel rank holds a part of the vocabulary and takes all tokens of the context rank through it, as
    Megatron's own output layer does. A collective over them, forwards and backwards.

    Args:
        hidden_states: [S, B, D], what enters the output layer.
        labels: [B, T], of the context rank.
        valid: bool [B, T].
    """
    group = shard.tensor_group
    head = _truncated(config, model, group)
    rows = hidden_states[..., : head.prefixes[-1]]
    if group is None:
        rows = wide(rows)
    else:
        rows = gather_rows(rows, group) if shard.layout.rows_split else share_work(rows, group)
    local, here = _rows_in_shard(labels.transpose(0, 1), head.weight, group)
    if config.record.labels == "no":
        here = torch.zeros_like(here)  # without a label the cross-entropy is the normalizer
    losses = truncated_head_losses(rows.flatten(0, 1), local.flatten(), here.flatten(), head)
    losses = (config.record.terms or _TERMS[config.objective])(losses)
    losses = torch.where(valid, losses.view(rows.shape[:2]).transpose(0, 1), 0.0)
    if group is None:
        return losses
    # Each rank adds its own anchors' terms to the loss, and all of them need the gradient of all anchors' terms.
    return share_work(losses, group)[:, shard.start : shard.layout.part_start(shard.rank[1] + 1)]


def _truncated(config: SimRegConfig, model: Any, tensor_group: dist.ProcessGroup | None) -> TruncatedHead:
    layer, weight = model.output_layer, _weight(model)
    width = weight.shape[1]
    return TruncatedHead(
        weight,
        config.prefixes or default_prefixes(width) if "prefixes" in config.options else (width,),
        bias=_bias(model),
        scale=_logit_scale(model),
        tensor_group=tensor_group,
        fuses=bool(getattr(layer, "gradient_accumulation_fusion", False)) and hasattr(weight, "main_grad"),
    )


def refuse_second_use(model: Any, objective: str) -> None:
    """Raise where the output layer cannot be trained by a second use of its weight in the same step.

    Raises:
        NotImplementedError: Megatron holds the weight, or its gradient, in a way of its own.
    """
    settings = model.config
    reasons: dict[str, bool] = {
        "the output layer's weight is not whole on its rank": not has_whole_head(model)
        or getattr(_weight(model), "__fsdp_param__", False),
        "--defer-embedding-wgrad-compute takes the output layer's gradient apart from the step's backward": getattr(
            settings, "defer_embedding_wgrad_compute", False
        ),
        "--fp8-output-proj computes the logits in another type": getattr(settings, "fp8_output_proj", False),
    }
    for reason, found in reasons.items():
        if found:
            raise NotImplementedError(
                f"SimReg objective {objective} does not work here, as {reason}: change that, or choose another one"
            )


@torch.no_grad()
def margins(model: Any, states: Tensor, labels: Tensor, tensor_group: dist.ProcessGroup | None) -> Tensor:
    """m_i = z_{i, y_i} - max_{j != y_i} z_{i, j} of the logits z: float32 [N], above 0 for a right prediction.

    Logits are taken in the type of the weights, as the model takes them, so in bfloat16 some tie: a margin of 0.
    Tensor-parallel ranks hold parts of the vocabulary and each brings its own N states: a collective over them.

    Args:
        states: [N, D], what enters the output layer; N is the same on all ranks of the group.
        labels: int64 [N]; one below 0 is never predicted: -inf.

    Source: arXiv 2605.08809, before its Lemma 1.
    """
    weight, bias, number = _weight(model).detach(), _bias(model), len(labels)
    if tensor_group is not None:
        states, labels = (gather(part, tensor_group) for part in (states, labels))
    tiles = zip(
        *(part.split(_STATES_AT_ONCE) for part in (states, *_rows_in_shard(labels, weight, tensor_group))), strict=True
    )
    logits = torch.cat([_label_and_largest_other(_logits(part, weight, bias), *place) for part, *place in tiles], dim=1)
    if tensor_group is not None:
        dist.all_reduce(logits, op=dist.ReduceOp.MAX, group=tensor_group)
    of_label, other = logits
    first = 0 if tensor_group is None else tensor_group.rank() * number
    return ((of_label - other) * _logit_scale(model))[first : first + number]


def _logits(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = states.to(weight.dtype) @ weight.T
    return logits if bias is None else logits + bias


def _label_and_largest_other(logits_NV: Tensor, local: Tensor, here: Tensor) -> Tensor:
    """[2, N]: the label's logit, or -inf where its row is on another rank, and the largest other one here.

    Overwrites the logits.
    """
    index, apart = torch.where(here, local, 0).unsqueeze(1), ~here.unsqueeze(1)
    of_label = logits_NV.gather(1, index)
    logits_NV.scatter_(1, index, torch.where(apart, of_label, -torch.inf))
    return torch.stack([of_label.masked_fill_(apart, -torch.inf).squeeze(1), logits_NV.amax(dim=1)]).float()


def _logit_scale(model: Any) -> float:
    """Return the factor by which the model multiplies its logits."""
    settings: Any = getattr(model, "config", None)
    return float(settings.mup_output_mult) if getattr(settings, "use_mup", False) else 1.0


def _rows_in_shard(labels: Tensor, weight: Tensor, tensor_group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Return each label's row in this rank's shard of the vocabulary, and whether it is there (never below 0)."""
    first = 0 if tensor_group is None else tensor_group.rank() * weight.shape[0]
    local = labels - first
    return local, (labels >= 0) & (local >= 0) & (local < weight.shape[0])


def _bias(model: Any) -> Tensor | None:
    """Return the bias of the output layer, [V]; Megatron's own models have none."""
    layer = getattr(model, "output_layer", None)
    return None if getattr(layer, "skip_bias_add", False) else getattr(layer, "bias", None)


def _weight(model: Any) -> Tensor:
    shares = bool(getattr(model, "share_embeddings_and_output_weights", False))
    weight: Tensor = model.shared_embedding_or_output_weight() if shares else model.output_layer.weight
    return weight
