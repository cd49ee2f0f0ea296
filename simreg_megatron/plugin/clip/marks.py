# SPDX-License-Identifier: Apache-2.0
"""Whether Megatron's mark of a parameter, cut over tensor-parallel ranks or the same on all, is true.

A norm over ranks counts every piece of a parameter that is cut, and one copy of one that is not. Where the mark is
wrong (releases differ in which modules set it), the norm is wrong and nothing else shows it. So a few numbers of each
parameter are compared between the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from simreg_megatron.plugin.clip.parameters import Named, is_expert

_NUMBERS = 16
_DRIFT = 0.1  # copies drift apart by rounding, in a whole training by far less; other numbers have nothing in common


def refuse_wrong_marks(named: Sequence[Named]) -> None:
    """A collective over the ranks that share or cut a parameter; experts are cut over ranks of their own.

    Raises:
        NotImplementedError: pieces are marked as copies, or copies as pieces.
    """
    from megatron.core import parallel_state

    groups = (
        (False, parallel_state.get_tensor_model_parallel_group),
        (True, parallel_state.get_expert_tensor_parallel_group),
    )
    for of_experts, group in groups:
        _refuse_among([entry for entry in named if is_expert(entry.parameter) == of_experts], group())


def _refuse_among(named: Sequence[Named], group: dist.ProcessGroup) -> None:
    if group.size() == 1:
        return
    plain = [entry for entry in named if type(entry.parameter.data) is Tensor]  # one of FP8 is not read so cheaply
    own = torch.stack([_numbers(entry.parameter) for entry in plain]) if plain else torch.empty(0, _NUMBERS)
    own = own.to(torch.device(torch.cuda.current_device()))
    found = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(found, own, group=group)
    for entry, numbers in zip(plain, torch.stack(found, dim=1).cpu(), strict=True):
        if (wrong := wrong_mark(numbers, is_cut=entry.is_cut)) is not None:
            raise NotImplementedError(
                f"--adagc cannot measure {entry.name}: Megatron says that tensor-parallel ranks {wrong}; use another "
                "release, train without tensor parallelism, or drop --adagc"
            )


def wrong_mark(numbers: Tensor, *, is_cut: bool) -> str | None:
    """What is wrong with the mark of a parameter whose first numbers on each rank are [ranks, numbers], or None."""
    first, others = numbers[0], numbers[1:]
    if is_cut:
        is_constant = bool((first == first[0]).all())  # as a bias or a norm begins
        return None if is_constant or not (others == first).all() else "cut it, and all hold the same"
    apart = torch.linalg.vector_norm(others - first, dim=-1) > _DRIFT * torch.linalg.vector_norm(first)
    return "hold the same of it, and they do not" if apart.any() else None


def _numbers(parameter: Any) -> Tensor:
    flat = parameter.detach().flatten()[:_NUMBERS].float()
    return torch.nn.functional.pad(flat, (0, _NUMBERS - flat.numel()))
