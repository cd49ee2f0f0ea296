# SPDX-License-Identifier: Apache-2.0
"""Generated tables are as new as the code under them, and the digest that shows it counts only what matters."""

from __future__ import annotations

import pytest

from tools import tables
from tools.tables import TABLES


@pytest.mark.parametrize("name", TABLES)
def test_the_table_is_of_the_code_that_is_here(name: str) -> None:
    assert not (why := tables.why_stale(name)), why


def test_every_tolerated_change_is_of_a_table_as_it_stands() -> None:
    made = {name: tables.stamp_of(tables.ROOT / table.page) for name, table in TABLES.items()}
    for one in tables.tolerances():
        stamp = made[one.table]
        assert stamp and stamp.code == one.made_from, f"the table was made again: remove the line of {one.reason!r}"
