# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of every token through the first features of the output layer, over ranks that split the vocabulary.

Only the model's own logits stay alive: tiles of tokens are computed, used and dropped, and recomputed in
the backward from the normalizers alone.

Shapes: N tokens, D features, V this rank's part of the vocabulary, K prefixes, P features of the largest of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from simreg_megatron.parallel.collectives import gather

_SLAB = {"cpu": 64 << 20, "cuda": 512 << 20}  # bytes of a tile's logits; each tile reads the whole weight


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

    def logits(self, rows: Tensor, prefix: int) -> Tensor:
        """[n, V] of rows [n, P], in the type of the weights as the model takes them, then at least float32."""
        logits = rows[:, :prefix].to(self.weight.dtype) @ self.weight[:, :prefix].mT
        if self.bias is not None:
            logits = logits + self.bias
        return logits.to(torch.promote_types(logits.dtype, torch.float32)) * self.scale

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
