# SPDX-License-Identifier: Apache-2.0
"""Choose the way through the pairs that a small input would not take."""

from typing import Any

import pytest

from simreg_megatron.kernels import torch as tiles


def limit(monkeypatch: pytest.MonkeyPatch, device: str = "cpu", **limits: int) -> None:
    """Set another side of tiles, other bytes to keep, or to work in."""
    monkeypatch.setitem(tiles.LIMITS, device, tiles.LIMITS[device]._replace(**limits))


def small_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add up the gradient of one tile's rows at a time, as if no more fitted."""
    plan_for = tiles.plan_for

    def small(*given: Any, **options: bool) -> tiles.Plan:
        plan = plan_for(*given, **options)
        return plan._replace(region=plan.side, kept=0)

    monkeypatch.setattr(tiles, "plan_for", small)
