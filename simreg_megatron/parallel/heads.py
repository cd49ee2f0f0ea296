# SPDX-License-Identifier: Apache-2.0
"""The output layer: its row for each label, by how much a hidden state predicts its label, and losses through a part.

No logits of these losses stay alive: tiles of tokens are computed, used and dropped, and recomputed in the backward
from the normalizers.

Shapes: B micro-batch, T tokens of the context rank, N tokens, D hidden, V this rank's part of the vocabulary, K
prefixes, P features of the largest of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from simreg_megatron.config import SimRegConfig
from simreg_megatron.losses.prefixes_ce import default_prefixes
from simreg_megatron.parallel.collectives import gather, gather_rows, share_work, wide
from simreg_megatron.parallel.shard import SequenceShard

_TERMS = {"prefixes-ce": lambda losses: losses, "z-loss": torch.square}  # from a cross-entropy or a normalizer
_SLAB = {"cpu": 64 << 20, "cuda": 512 << 20}  # bytes of a tile's logits; each tile reads the whole weight
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

    It is made of the token's cross-entropy through the output layer, truncated to prefixes if it has these; or of the
    normalizer log sum_j exp z_ij, if it uses no labels. Every tensor-parallel rank holds a part of the vocabulary and
    takes all tokens of the context rank through it, as Megatron's own output layer does: a collective both ways.

    Args:
        hidden_states: [S, B, D], what enters the output layer.
        labels: [B, T], of the context rank.
        valid: bool [B, T].
    """
    group = shard.tensor_group
    width = _weight(model).shape[1]
    prefixes = config.prefixes or default_prefixes(width) if "prefixes" in config.options else (width,)
    head = _truncated(model, group, prefixes)
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


def _truncated(model: Any, tensor_group: dist.ProcessGroup | None, prefixes: tuple[int, ...]) -> TruncatedHead:
    layer, weight = model.output_layer, _weight(model)
    settings: Any = getattr(model, "config", None)
    return TruncatedHead(
        weight, prefixes, tensor_group=tensor_group,
        bias=None if getattr(layer, "skip_bias_add", False) else getattr(layer, "bias", None),
        scale=float(settings.mup_output_mult) if getattr(settings, "use_mup", False) else 1.0,
        fuses=bool(getattr(layer, "gradient_accumulation_fusion", False)) and hasattr(weight, "main_grad"),
    )  # fmt: skip


def refuse_second_use(model: Any, objective: str) -> None:
    """Raise if the output layer cannot be trained by a second use of its weight in the same step."""
    reasons = []
    if not has_whole_head(model) or getattr(_weight(model), "__fsdp_param__", False):
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
        states: [N, D], what enters the output layer; N is the same on all ranks of the group.
        labels: int64 [N]; one below 0 is never predicted: -inf.

    Source: arXiv 2605.08809, before its Lemma 1.
    """
    head, number = _truncated(model, tensor_group, (states.shape[1],)), len(labels)
    if tensor_group is not None:
        states, labels = (gather(part, tensor_group) for part in (states, labels))
    local, here = _rows_in_shard(labels, head.weight, tensor_group)
    found = []
    for tile in (slice(first, first + _STATES_AT_ONCE) for first in range(0, len(states), _STATES_AT_ONCE)):
        logits = head.unscaled(states[tile], head.prefixes[0])
        index, apart = torch.where(here, local, 0)[tile].unsqueeze(1), ~here[tile].unsqueeze(1)
        of_label = logits.gather(1, index)
        logits.scatter_(1, index, torch.where(apart, of_label, -torch.inf))
        found.append(torch.stack([of_label.masked_fill_(apart, -torch.inf).squeeze(1), logits.amax(dim=1)]).float())
    both = torch.cat(found, dim=1)  # the label's logit, or -inf if its row is on another rank; the largest other one
    if tensor_group is not None:
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=tensor_group)
    first = 0 if tensor_group is None else tensor_group.rank() * number
    return ((both[0] - both[1]) * head.scale)[first : first + number]


def _rows_in_shard(labels: Tensor, weight: Tensor, tensor_group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Return each label's row in this rank's shard of the vocabulary, and whether it is there (never below 0)."""
    first = 0 if tensor_group is None else tensor_group.rank() * weight.shape[0]
    local = labels - first
    return local, (labels >= 0) & (local >= 0) & (local < weight.shape[0])


def _weight(model: Any) -> Tensor:
    shares = bool(getattr(model, "share_embeddings_and_output_weights", False))
    weight: Tensor = model.shared_embedding_or_output_weight() if shares else model.output_layer.weight
    return weight


@dataclass(frozen=True)
class TruncatedHead:
    """The output layer, and how much of it is used.

    Attributes:
        weight: [V, D], the parameter itself.
        prefixes: numbers of leading features.
        bias: [V], where the layer has one.
        scale: what the model multiplies its logits with.
        tensor_group: ranks that hold the other parts of the vocabulary; None where this one has all of it.
        fuses: whether the weight's gradient is added to its `main_grad` at once and autograd gets none. Where the
            layer's own backward does so, Megatron ignores what autograd brings.
    """

    weight: Tensor
    prefixes: tuple[int, ...]
    bias: Tensor | None = None
    scale: float = 1.0
    tensor_group: dist.ProcessGroup | None = None
    fuses: bool = False

    def unscaled(self, rows: Tensor, prefix: int) -> Tensor:
        """Compute [n, V] from rows [n, P], in the type of the weights, as the model does."""
        logits = rows[:, :prefix].to(self.weight.dtype) @ self.weight[:, :prefix].mT
        return logits if self.bias is None else logits + self.bias

    def logits(self, rows: Tensor, prefix: int) -> Tensor:
        """Compute [n, V] from rows [n, P], at least float32."""
        return wide(self.unscaled(rows, prefix)) * self.scale

    def tiles(self, num_tokens: int) -> Iterator[slice]:
        step = max(1, _SLAB.get(self.weight.device.type, _SLAB["cuda"]) // (4 * len(self.weight)))
        return (slice(first, first + step) for first in range(0, num_tokens, step))


def truncated_head_losses(rows: Tensor, local: Tensor, here: Tensor, head: TruncatedHead) -> Tensor:
    """mean_p -log softmax(scale (W[:, :p] e_i[:p] + b))[y_i] of each token, [N]; the same on all ranks of the group.

    A collective of a few numbers for each token. Backward: none, so a rank's gradient of the rows is that of its part
    of the vocabulary, to be summed over the group; those of weight and bias are whole.

    Args:
        rows: [N, P], the first features of all tokens, at least float32; the same on all ranks.
        local: int64 [N], the label's row of this rank's part of the vocabulary.
        here: bool [N], whether it is there.
    """
    return _Losses.apply(rows, head.weight, head.bias, local, here, head)


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, local: Tensor, here: Tensor, head: TruncatedHead
    ) -> Tensor:
        normalizers = rows.new_empty(len(head.prefixes), len(rows))
        of_labels = torch.empty_like(normalizers)
        index = torch.where(here, local, 0).unsqueeze(-1)
        for tile in head.tiles(len(rows)):
            for k, prefix in enumerate(head.prefixes):
                logits = head.logits(rows[tile], prefix)
                normalizers[k, tile] = logits.logsumexp(dim=-1)
                of_labels[k, tile] = logits.gather(-1, index[tile]).squeeze(-1).masked_fill(~here[tile], 0.0)
        if head.tensor_group is not None:
            normalizers = gather(normalizers.unsqueeze(0), head.tensor_group).logsumexp(dim=0)
            dist.all_reduce(of_labels, group=head.tensor_group)  # one number plus zeros: exact in any order
        ctx.save_for_backward(rows, weight, index, here, normalizers)
        ctx.head = head
        return (normalizers - of_labels).mean(dim=0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None, None]:
        rows, weight, index, here, normalizers = ctx.saved_tensors
        head: TruncatedHead = ctx.head
        share = (grads[0] * head.scale / len(head.prefixes)).unsqueeze(-1)
        grad_rows = torch.zeros_like(rows)
        grad_weight = rows.new_zeros(len(weight), rows.shape[1]) if ctx.needs_input_grad[1] else None
        grad_bias = rows.new_zeros(len(weight)) if ctx.needs_input_grad[2] else None
        for tile in head.tiles(len(rows)):
            own = rows[tile].to(weight.dtype)
            for k, prefix in enumerate(head.prefixes):
                grad = (head.logits(rows[tile], prefix) - normalizers[k, tile].unsqueeze(-1)).exp_()
                grad.scatter_add_(-1, index[tile], -here[tile].to(grad.dtype).unsqueeze(-1))
                grad = grad.mul_(share[tile]).to(weight.dtype)
                grad_rows[tile, :prefix] += grad @ weight[:, :prefix]
                if grad_weight is not None:
                    grad_weight[:, :prefix] += grad.mT @ own[:, :prefix]
                if grad_bias is not None:
                    grad_bias += grad.sum(dim=0)
        return grad_rows, _handed_on(grad_weight, weight, fuses=head.fuses), grad_bias, None, None, None


def _handed_on(grad_VP: Tensor | None, weight: Any, *, fuses: bool) -> Tensor | None:
    """Return the gradient of the whole weight for autograd, or None if `main_grad` has it already."""
    if grad_VP is None:
        return None
    columns = grad_VP.shape[1]
    if fuses:
        weight.main_grad[:, :columns] += grad_VP
        return None
    whole = torch.zeros_like(weight)
    whole[:, :columns] = grad_VP
    return whole
