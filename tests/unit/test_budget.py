# SPDX-License-Identifier: Apache-2.0
"""The package grows where somebody says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import budget


def test_no_room_has_outgrown_its_budget() -> None:
    assert not budget.grown(budget.counted(), budget.allowed())


def test_what_has_grown_and_what_is_new_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "a.py").write_text("x = 1\n\n" * 60)
    (tmp_path / "alone.py").write_text("y = 2\n" * (budget.LONGEST_FILE + 1))
    now = budget.counted(tmp_path)
    assert now["room"] == 60 and now["modules of their own"] == 301 and now["files above 300 lines"] == 1
    budget.write(now, tmp_path / "budget.csv")
    most = budget.allowed(tmp_path / "budget.csv")
    assert most["room"] == 100 and most["files above 300 lines"] == 1 and not budget.grown(now, most)
    assert budget.grown({**now, "room": 101}, most) == ["room: 101, and 100 are allowed"]
    assert budget.grown({**now, "attic": 1}, most) == ["attic: 1, and it has no budget"]
