# SPDX-License-Identifier: Apache-2.0
"""What all ranks must know of each other before the first step: every name, who counts what, which norms there are."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from simreg_megatron.plugin.clip.parameters import Named


class Held(NamedTuple):
    """A tensor that the optimizer steps on: a parameter, its float32 copy, or this rank's piece of that."""

    tensor: Any
    slot: int
    contributes: bool


def all_names(own: list[str]) -> list[str]:
    """The names of all ranks, sorted. A collective."""
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, own)
    return sorted({name for names in gathered for name in names})


def refuse_miscounted(names: list[str], held: list[Held], whole: dict[int, int], device: torch.device) -> None:
    """Every element of every parameter counts on exactly one rank, or its norm would be wrong. A collective."""
    counted, expected = torch.zeros(2, len(names), dtype=torch.int64)
    for piece in held:
        counted[piece.slot] += piece.tensor.numel() if piece.contributes else 0
    for slot, elements in whole.items():
        expected[slot] = elements
    counted, expected = counted.to(device), expected.to(device)
    dist.all_reduce(counted)
    dist.all_reduce(expected, op=dist.ReduceOp.MAX)
    for slot in (counted != expected).nonzero().flatten().tolist():
        raise NotImplementedError(
            f"--adagc would count {counted[slot]} elements of {names[slot]}, which has {expected[slot]}: it does not "
            "know how this optimizer spreads gradients over ranks, so use another optimizer, or drop --adagc"
        )


def apart(named: list[Named], slots: dict[str, int], variant: str, device: torch.device) -> Tensor | None:
    """Bool [N]: parameters of detached prediction heads, which Megatron (from 0.19 on) clips by a norm of their own;
    None where there are none. A collective."""
    found = torch.zeros(len(slots), dtype=torch.int64)
    for entry in named:
        found[slots[entry.name]] = getattr(entry.parameter, "grad_norm_group", None) is not None
    found = found.to(device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    if not found.any():
        return None
    if variant == "global":
        raise NotImplementedError(
            "--adagc-variant global has one norm, and --mtp-detach-heads asks for a second one: drop one of them"
        )
    return found.bool()
