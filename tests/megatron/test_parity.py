# SPDX-License-Identifier: Apache-2.0
"""The core of the parity table: the same function in every layout, on real text, and what is wrong is seen.

`make parity` prints the whole table.
"""

from dataclasses import replace

import pytest

from tests.helpers.quick import quick
from tests.megatron.parity.cells import CELLS, LOCAL_MEANS, Cell
from tests.megatron.parity.run import Bench, fits

SLOW = ("count-corrected", "tied, ", "mtp, ", "learnable", "simreg:10,sigreg:0.3,sce:1", "DP2 distributed optimizer")
SLOW += ("sigreg sample=replicas", "simcse gather", "packed chats", "prefixes-ce")
CORE = quick([cell for cell in CELLS if cell.core], lambda cell: not any(words in cell.name for words in SLOW))


@pytest.mark.parametrize("cell", CORE, ids=lambda cell: cell.name)
def test_core_cell(bench: Bench, cell: Cell) -> None:
    row = bench.judge(cell)
    assert row.as_expected, f"{row.verdict}: {row.trouble or row.difference}, share {row.share:.2f}"


def test_a_mean_of_local_means_is_seen_in_the_log_alone(bench: Bench) -> None:
    row = bench.judge(LOCAL_MEANS)
    assert row.as_expected and row.difference is not None, row.trouble
    bound, gap = LOCAL_MEANS.bound, row.difference
    assert fits(replace(gap, logged=0.0), bound) and gap.logged > 10 * bound.logged, gap
