# SPDX-License-Identifier: Apache-2.0
"""Choose the way through the pairs that a small input would not take."""

from __future__ import annotations

from typing import Any

import pytest

from simreg_megatron.kernels import walk


def budget(monkeypatch: pytest.MonkeyPatch, device: str = "cpu", **bytes_: int) -> None:
    """Other bytes to keep, or to work in."""
    monkeypatch.setitem(walk.BUDGET, device, walk.BUDGET[device]._replace(**bytes_))


def one_side_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Panel by panel, as if no gradient fitted."""
    way_through = walk.way_through

    def alone(*given: Any) -> walk.Way:
        return way_through(*given)._replace(shares=False)

    monkeypatch.setattr(walk, "way_through", alone)
