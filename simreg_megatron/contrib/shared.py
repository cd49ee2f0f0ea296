# SPDX-License-Identifier: Apache-2.0
"""What several objectives share: sums to which every rank adds its own tokens, random numbers, and a check.

Only these sums and their gradients are sent between ranks. Random numbers follow from a seed and the iteration: all
ranks draw the same, and a resumed run goes on.

Shapes: B micro-batch, A anchors of this rank, D hidden.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from simreg_megatron.parallel.pairs import View
from simreg_megatron.parallel.shard import SequenceShard

Add = Callable[[Tensor], Tensor]
"""Returns the sum over the ranks that hold other tokens; backward: the sum of their gradients."""
Replicas = Callable[[], dist.ProcessGroup]
"""Returns the group of the ranks with other sequences; called only by objectives that compare these."""


def check_one_number(name: str, scalar: object) -> None:
    if isinstance(scalar, Tensor) and scalar.numel() != 1:
        raise ValueError(f"{name} must be one number, got {list(scalar.shape)}: others would scale features or tokens.")


class OwnTokens(NamedTuple):
    """This rank's anchors, in the order of its rows."""

    embeddings: Tensor  # [B, A, D]
    labels: Tensor  # [B, A]
    usable: Tensor  # bool [B, A]
    positions: Tensor  # int64 [A], on the sequence


def own_tokens(views: list[View], shard: SequenceShard) -> OwnTokens:
    embeddings, labels, usable = (
        torch.cat([per_token[:, slice(*view.anchors)] for per_token, view in zip(per_view, views, strict=True)], dim=1)
        for per_view in zip(*((view.embeddings, view.labels, view.usable) for view in views), strict=True)
    )
    runs = shard.layout.anchors(shard.rank)
    positions = torch.cat([torch.arange(first, last, device=embeddings.device) for first, last in runs])
    return OwnTokens(embeddings, labels, usable, positions)


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def sum_over(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum the parts of all ranks, on every rank. Backward: sum the gradients of all ranks, as each reads the sum."""
    return _SumOver.apply(part, group)


def sum_over_sequence(part: Tensor, shard: SequenceShard) -> Tensor:
    """Sum over the ranks that share the sequences; the backward is the same sum of their gradients."""
    for group in shard.anchor_groups:
        part = sum_over(part, group)
    return part


def random_numbers(number: int, *, seed: int, iteration: int, device: torch.device) -> Tensor:
    """Draw uniform numbers [number] in [0, 1), the same for equal seeds and iterations on all devices of one kind."""
    generator = seeded_generator(f"placebo {seed} {iteration}", device)  # by the first objective that drew them
    return torch.rand(number, generator=generator, device=device, dtype=torch.float32)


def seeded_generator(text: str, device: torch.device) -> torch.Generator:
    """Make a generator seeded by a text, with the same numbers on all devices of one kind."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()  # the CPU looks at 32 bits of a seed only
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
