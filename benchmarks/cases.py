# SPDX-License-Identifier: Apache-2.0
"""Ways to compute the same loss, and the hidden states they are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from simreg_megatron.kernels import torch as tiles
from simreg_megatron.kernels.contrast import cut
from simreg_megatron.losses import simreg_loss

Loss = Callable[[Tensor, Tensor], Tensor]  # embeddings [b, n, d], labels [b, n]


@dataclass(frozen=True)
class Size:
    """`batch` sequences of `length` tokens, each one chunk, with `width` features."""

    batch: int
    length: int
    width: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.length} x {self.width}"

    @property
    def all_pairs(self) -> int:
        """Multiply-adds of one product of all pairs."""
        return self.batch * self.length**2 * self.width


def hidden_states(batch: int, length: int, width: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Clusters around a common direction, as in a trained model: cosines near 0.6 between labels, 0.9 within one."""
    generator = torch.Generator().manual_seed(0)
    labels = (torch.rand(batch, length, generator=generator) ** 3 * 1000).long()  # few labels are frequent
    centres = torch.randn(1000, width, generator=generator) + 1.2
    rows = centres[labels] + 0.4 * torch.randn(batch, length, width, generator=generator)
    return rows.to(device, dtype), labels.to(device)


def dense(embeddings: Tensor, labels: Tensor) -> Tensor:
    """The equation as one would write it first: a matrix of all pairs, two log-sums, autograd. In float32."""
    unit = F.normalize(embeddings.float(), dim=-1)
    logits = unit @ unit.mT / 0.01
    same = labels.unsqueeze(-1) == labels.unsqueeze(-2)
    positives = logits.masked_fill(~same, -torch.inf).logsumexp(dim=-1)
    negatives = logits.masked_fill(same, -torch.inf).logsumexp(dim=-1)
    return F.softplus(negatives - positives).mean()


def sup_con(embeddings: Tensor, labels: Tensor) -> Tensor:
    """The nearest loss of pytorch-metric-learning, sequence by sequence: another function, with the same pairs."""
    from pytorch_metric_learning.losses import SupConLoss

    loss = SupConLoss(temperature=0.01)
    return torch.stack([loss(rows.float(), ids) for rows, ids in zip(embeddings, labels, strict=True)]).mean()


@cache
def _compiled_reference() -> Loss:
    return torch.compile(partial(simreg_loss, impl="reference"))


def compiled(embeddings: Tensor, labels: Tensor) -> Tensor:
    """torch.compile of the reference."""
    return _compiled_reference()(embeddings, labels)


def exact(embeddings: Tensor, labels: Tensor) -> Tensor:
    """In float64: the reference where its matrices fit, else the tiles, which the tests hold equal to it."""
    impl = "reference" if embeddings.shape[0] * embeddings.shape[1] ** 2 <= 2**25 else "tiled"
    return simreg_loss(embeddings.double(), labels, impl=impl)


LOSSES: dict[str, Loss] = {
    "dense": dense,
    "reference": partial(simreg_loss, impl="reference"),
    "compiled": compiled,
    "tiled": partial(simreg_loss, impl="tiled"),
    "triton": partial(simreg_loss, impl="triton"),
    "SupConLoss": sup_con,
}
SAME_FUNCTION = ("dense", "reference", "compiled", "tiled", "triton")


def multiply_adds(name: str, size: Size, dtype: torch.dtype, device: str, *, backward: bool) -> int:
    """Count the multiply-adds of the products of features, tile by tile, without exponentials and masks."""
    if name == "triton":
        from simreg_megatron.kernels import triton

        # Half of the pairs forward; backward all of their products, and the pairs again if they are not kept.
        again = size.length > triton.LONGEST_KEPT
        return size.all_pairs // 2 + (size.all_pairs * (2 if again else 1) if backward else 0)
    if name != "tiled":
        return size.all_pairs * (3 if backward else 1)
    rows = torch.empty(size.batch, 1, size.length, size.width, dtype=dtype, device=device)
    anchors = 0, size.length
    plan = tiles.plan_for(rows, anchors, by_document=False)
    pairs = tiles.count_pairs(tiles.triangle(anchors, size.length, plan.side))
    if backward:
        pairs += size.length**2
        if not plan.num_saved:
            regions = cut(anchors, plan.region)
            pairs += sum(tiles.count_pairs(tiles.triangle(one, size.length, plan.side)) for one in regions)
    return size.batch * size.width * pairs
