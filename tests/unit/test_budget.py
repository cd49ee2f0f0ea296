# SPDX-License-Identifier: Apache-2.0
"""The package grows where somebody says so."""

from __future__ import annotations

from tools import budget


def test_no_room_has_outgrown_its_budget() -> None:
    assert not budget.grown(budget.counted(), budget.allowed())
