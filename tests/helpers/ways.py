# SPDX-License-Identifier: Apache-2.0
"""Choose the way through the pairs that a small input would not take."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from simreg_megatron.kernels import torch as tiles


def limit(monkeypatch: pytest.MonkeyPatch, device: str = "cpu", **limits: int) -> None:
    """Set another side of tiles, other bytes to keep, or to work in."""
    monkeypatch.setitem(tiles.LIMITS, device, tiles.LIMITS[device]._replace(**limits))


def kept_bytes(forward: Callable[[], Tensor], *given: Tensor) -> int:
    """Sum up what autograd keeps for the backward, without the tensors that are given."""
    found: dict[int, Tensor] = {}  # kept alive, so that no two have one address

    def keep(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        assert forward().requires_grad
    own = {tensor.data_ptr() for tensor in given}
    return sum(tensor.untyped_storage().nbytes() for place, tensor in found.items() if place not in own)


def small_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add up the gradient of one tile's rows at a time, as if no more fitted."""
    plan_for = tiles.plan_for

    def small(*given: Any, **options: bool) -> tiles.Plan:
        plan = plan_for(*given, **options)
        return plan._replace(region=plan.side, num_saved=0)

    monkeypatch.setattr(tiles, "plan_for", small)
