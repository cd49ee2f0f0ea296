# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy through the truncated output layer, and the normalizers of its logits: in plain torch, and over ranks.

No logits of these losses stay alive: tiles of tokens are computed, used and dropped, and recomputed in the backward
from the normalizers.

Shapes: b sequences, n tokens, d features, v ids of the vocabulary; over ranks B micro-batch, T tokens of the context
rank, N tokens, D hidden, V this rank's part of the vocabulary, K prefixes, P features of the largest of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from simreg_megatron.config import SimRegConfig
from simreg_megatron.kernels.precision import no_autocast, product
from simreg_megatron.losses._chunks import as_batch, at_least_float32, check_tokens
from simreg_megatron.objectives import ExampleSettings, Kind, Objective
from simreg_megatron.parallel.collectives import gather, share_work
from simreg_megatron.parallel.output_layer import Head, head_of, rows_in_shard
from simreg_megatron.parallel.shard import SequenceShard

_SLAB = {"cpu": 64 << 20, "cuda": 512 << 20}  # bytes of a tile's logits; each tile reads the whole weight


def prefixes_ce_loss(
    embeddings: Tensor,
    labels: Tensor,
    weight: Tensor,
    *,
    prefixes: tuple[int, ...] = (),
    bias: Tensor | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """L = mean_i mean_p -log softmax(W[:, :p] e_i[:p] + b)[y_i],  i the tokens that count, p the prefixes.

    What a model loses that keeps the first p features alone, of its states and of its output layer W.

    Args:
        embeddings: [b, n, d] or [n, d]. Logits are taken in the type of the weight, as a model takes them, outside any
            autocast; all else is float32 (float64 for float64).
        labels: integer [b, n], rows of the weight; a token with a label below 0 does not count.
        weight: floating point [v, d], of the output layer.
        prefixes: each from 1 to d; empty: powers of two from 16 to half the width.
        bias: [v].
        valid: bool [b, n].

    Raises:
        ValueError: an argument is out of range, or shapes or types do not fit; torch's own error for a label
            beyond the rows of the weight.

    Source: Matryoshka representation learning, arXiv 2205.13147; one layer for all prefixes is its "efficient" form.
    """
    check_tokens(embeddings, labels, valid, None, 0)
    embeddings, labels, valid = as_batch(embeddings, labels, valid)
    width = embeddings.shape[-1]
    if weight.shape[1:] != (width,) or not weight.is_floating_point():
        raise ValueError(f"weight must be floating point [v, {width}], got {weight.dtype} {list(weight.shape)}.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias must be {list(weight.shape[:1])}, one for each row of the weight, got {list(bias.shape)}."
        )
    counts = (labels >= 0) if valid is None else valid & (labels >= 0)
    rows = embeddings.masked_fill(~counts.unsqueeze(-1), 0.0).flatten(0, 1).to(weight.dtype)
    targets = labels.long().masked_fill(~counts, -100).flatten()
    with no_autocast(rows.device.type):
        losses = [
            _cross_entropy_sum(product(rows[:, :prefix], weight[:, :prefix].mT), bias, targets)
            for prefix in prefixes_within(prefixes, width, width)
        ]
    return torch.stack(losses).mean() / counts.sum().clamp(min=1)


def _cross_entropy_sum(logits: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    logits = at_least_float32(logits if bias is None else logits + bias)
    return functional.cross_entropy(logits, targets, reduction="sum")


def prefixes_within(prefixes: tuple[int, ...], width: int, most: int) -> tuple[int, ...]:
    """Return the prefixes, or the default ones.

    Raises:
        ValueError: one of them has no feature, or more than `most`.
    """
    chosen = prefixes or default_prefixes(width)
    if outside := [prefix for prefix in chosen if not 1 <= prefix <= most]:
        raise ValueError(f"a prefix must be from 1 to {most} features of {width}, got {outside[0]}.")
    return chosen


def default_prefixes(width: int) -> tuple[int, ...]:
    """Powers of two from 16 to half the width, or half the width, at least 1, where it is below 32."""
    return tuple(2**k for k in range(4, 31) if 2**k <= width // 2) or (max(1, width // 2),)


def head_terms(
    config: SimRegConfig, model: Any, hidden_states: Tensor, labels: Tensor, valid: Tensor, shard: SequenceShard,
    transform: Callable[[Tensor], Tensor] = lambda losses: losses,
) -> Tensor:  # fmt: skip
    """Compute the objective's term of each anchor from its logits, [B, A]; 0 where a token does not count.

    It is made of the token's cross-entropy through the output layer, truncated to prefixes if it has these; or of the
    normalizer log sum_j exp z_ij, if it uses no labels. Every tensor-parallel rank holds a part of the vocabulary and
    takes all tokens of the context rank through it, as Megatron's own output layer does: a collective both ways.

    Args:
        hidden_states: [S, B, D], what enters the output layer.
        labels: [B, T], of the context rank.
        valid: bool [B, T].
        transform: the term of each token from its cross-entropy or normalizer.
    """
    group, layer = shard.tensor_group, head_of(model)
    width = layer.weight.shape[1]
    prefixes = config.prefixes or default_prefixes(width) if "prefixes" in config.options else (width,)
    fuses = getattr(model.output_layer, "gradient_accumulation_fusion", False) and hasattr(layer.weight, "main_grad")
    head = TruncatedHead(layer, prefixes, group, fuses)
    rows = hidden_states[..., : head.prefixes[-1]]
    if group is None:
        rows = at_least_float32(rows)
    else:
        rows = _GatherRows.apply(rows, group) if shard.layout.rows_split else share_work(rows, group)
    row, has_row = rows_in_shard(labels.transpose(0, 1), layer.weight, group)
    if config.record.labels == "no":
        has_row = torch.zeros_like(has_row)  # without a label the cross-entropy is the normalizer
    losses = truncated_head_losses(rows.flatten(0, 1), row.flatten(), has_row.flatten(), head)
    losses = torch.where(valid, transform(losses).view(rows.shape[:2]).transpose(0, 1), 0.0)
    if group is None:
        return losses
    # Each rank adds its own anchors' terms to the loss, and all of them need the gradient of all anchors' terms.
    return share_work(losses, group)[:, shard.start : shard.layout.part_start(shard.rank[1] + 1)]


class TruncatedHead(NamedTuple):
    """The output layer, and how much of it is used."""

    layer: Head
    prefixes: tuple[int, ...]  # numbers of leading features
    tensor_group: dist.ProcessGroup | None = None  # ranks that hold the other parts of the vocabulary, if there are any
    fuses: bool = False
    """Whether the weight's gradient is added to its `main_grad` at once and autograd gets none: where the layer's own
    backward does so, Megatron ignores what autograd brings."""

    def logits(self, rows: Tensor, prefix: int) -> Tensor:
        """Compute [n, V] from rows [n, P], at least float32."""
        return at_least_float32(self.layer.unscaled(rows, prefix)) * self.layer.scale

    def tiles(self, num_tokens: int) -> Iterator[slice]:
        weight = self.layer.weight
        step = max(1, _SLAB.get(weight.device.type, _SLAB["cuda"]) // (4 * len(weight)))
        return (slice(first, first + step) for first in range(0, num_tokens, step))


class _GatherRows(torch.autograd.Function):
    """Concatenate all ranks' rows, at least float32. Backward: each rank gets its rows' gradients, summed."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.dtype = group, own.dtype
        return at_least_float32(gather(own, group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        own = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(own, grad.contiguous(), group=ctx.group)
        return own.to(ctx.dtype), None


def truncated_head_losses(rows: Tensor, row: Tensor, has_row: Tensor, head: TruncatedHead) -> Tensor:
    """mean_p -log softmax(scale (W[:, :p] e_i[:p] + b))[y_i] of each token, [N]; the same on all ranks of the group.

    A collective of a few numbers for each token. Backward: none, so a rank's gradient of the rows is that of its part
    of the vocabulary, to be summed over the group; those of weight and bias are whole.

    Args:
        rows: [N, P], the first features of all tokens, at least float32; the same on all ranks.
        row: int64 [N], the label's row of this rank's part of the vocabulary.
        has_row: bool [N], whether it is there.
    """
    return _Losses.apply(rows, head.layer.weight, head.layer.bias, row, has_row, head)


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, row: Tensor, has_row: Tensor, head: TruncatedHead
    ) -> Tensor:
        normalizers = rows.new_empty(len(head.prefixes), len(rows))
        label_logits = torch.empty_like(normalizers)
        index = torch.where(has_row, row, 0).unsqueeze(-1)
        for tile in head.tiles(len(rows)):
            for k, prefix in enumerate(head.prefixes):
                logits = head.logits(rows[tile], prefix)
                normalizers[k, tile] = logits.logsumexp(dim=-1)
                label_logits[k, tile] = logits.gather(-1, index[tile]).squeeze(-1).masked_fill(~has_row[tile], 0.0)
        if head.tensor_group is not None:
            normalizers = gather(normalizers.unsqueeze(0), head.tensor_group).logsumexp(dim=0)
            dist.all_reduce(label_logits, group=head.tensor_group)  # one number plus zeros: exact in any order
        ctx.save_for_backward(rows, weight, index, has_row, normalizers)
        ctx.head = head
        return (normalizers - label_logits).mean(dim=0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None, None]:
        rows, weight, index, has_row, normalizers = ctx.saved_tensors
        head: TruncatedHead = ctx.head
        share = (grads[0] * head.layer.scale / len(head.prefixes)).unsqueeze(-1)
        grad_rows = torch.zeros_like(rows)
        grad_weight = rows.new_zeros(len(weight), rows.shape[1]) if ctx.needs_input_grad[1] else None
        grad_bias = rows.new_zeros(len(weight)) if ctx.needs_input_grad[2] else None
        for tile in head.tiles(len(rows)):
            own = rows[tile].to(weight.dtype)
            for k, prefix in enumerate(head.prefixes):
                grad = (head.logits(rows[tile], prefix) - normalizers[k, tile].unsqueeze(-1)).exp_()
                grad.scatter_add_(-1, index[tile], -has_row[tile].to(grad.dtype).unsqueeze(-1))
                grad = grad.mul_(share[tile]).to(weight.dtype)
                grad_rows[tile, :prefix] += grad @ weight[:, :prefix]
                if grad_weight is not None:
                    grad_weight[:, :prefix] += grad.mT @ own[:, :prefix]
                if grad_bias is not None:
                    grad_bias += grad.sum(dim=0)
        return grad_rows, _gradient_for_autograd(grad_weight, weight, fuses=head.fuses), grad_bias, None, None, None


def _gradient_for_autograd(grad_VP: Tensor | None, weight: Any, *, fuses: bool) -> Tensor | None:
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


PREFIXES_CE = Objective(
    name="prefixes-ce", kind=Kind.HEAD, terms=head_terms,
    asks="first features that predict the next token by themselves",
    sent="prefixes of states, where sequence parallelism splits them",
    options={"prefixes": "auto"},
    prefixes_below_width=True,  # all features are what the language-model loss itself has
    example=ExampleSettings(weight=0.5, options="prefixes=8/32", chunk_size=None),
)  # fmt: skip
Z_LOSS = Objective(
    name="z-loss", kind=Kind.HEAD, terms=functools.partial(head_terms, transform=torch.square),
    asks="normalizers of the logits near 0", labels="no", sent="as with `prefixes-ce`",
    example=ExampleSettings(weight=0.05, chunk_size=None),
)  # fmt: skip
