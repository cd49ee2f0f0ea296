# SPDX-License-Identifier: Apache-2.0
"""The core of the parity table: the same function in every layout, on real text, and what is wrong is seen.

`make parity` prints the whole table.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.helpers.quick import quick
from tests.megatron.parity.__main__ import chosen
from tests.megatron.parity.cells import CELLS, LOCAL_MEANS, Cell
from tests.megatron.parity.run import Bench, fits

# What other cells show too: the same split of another objective, or the same objective split otherwise. Two mistakes
# stay quick; every objective is also asked over ranks in tests/objectives.
SHOWN_ELSEWHERE = (
    "deep, TP2 SP full recompute, chunk 24 layers 1,2,3,4,final",
    "dense, micro-batch 1, chunk 24",
    "dense, TP2 SP, whole local",
    "dense, TP2 SP, chunk 24, few samples",
    "dense, TP2 SP, chunk 24 count-corrected, masked ends",
    "dense, CP2, cpretrain whole, per token, masked ends",
    "dense, TP2 SP, simcse, per token, masked ends",
    "deep, PP2 VPP2, chunk 24",
    "dense, PP2, chunk 16",
    "dense, TP2, chunk 16",
    "dense, TP2 SP, chunk 24 layer 1",
    "dense, TP2 SP, sce chunk 24",
    "dense, CP2, chunk 24, per token, masked ends",
    "dense, TP2 SP, chunk 24 prefixes 16/64",
    "dense, TP2 SP, simcse view=dropout",
    "dense, CP2, sigreg whole, per token, masked ends",
    "dense, CP2, prefixes-ce prefixes=8/32, per token, masked ends",
    "dense, TP2 SP, sigmoid pairs=hidden-head,pair_reduction=balanced,trains=none chunk 24",
    "tied, PP2, prefixes-ce prefixes=8/32",
    "dense, DP2 distributed optimizer, chunk 24",
    "dense, TP2, creg chunk 24",
    "dense, TP2 SP, sigreg chunk 24",
    "dense, TP2 SP, mic chunk 24",
    "dense, TP2 SP, sigmoid pair_reduction=balanced,trains=none chunk 24",
    "dense, TP2 SP, prefixes-ce prefixes=8/32, vs 1 process, halved weight gradient",
    "dense, TP2 SP, chunk 24, vs 1 process, doubled scale",
    "dense, DP2, chunk 24, vs 1 process, shifted labels",
    "dense, PP2, whole, vs 1 process, flattened batch",
    "dense, TP2 SP, chunk 24, per token, masked ends, vs 1 process, masked tokens kept",
    "dense, TP2, whole, vs 1 process, shared work not summed",
)
CORE = quick([cell for cell in CELLS if cell.core], lambda cell: cell.name not in SHOWN_ELSEWHERE)


@pytest.mark.parametrize("cell", CORE, ids=lambda cell: cell.name)
def test_core_cell(bench: Bench, cell: Cell) -> None:
    row = bench.judge(cell)
    assert row.as_expected, f"{row.verdict}: {row.trouble or row.difference}, share {row.share:.2f}"


def test_a_mean_of_local_means_is_seen_in_the_log_alone(bench: Bench) -> None:
    row = bench.judge(LOCAL_MEANS)
    assert row.as_expected and row.difference is not None, row.trouble
    bound, gap = LOCAL_MEANS.bound, row.difference
    assert fits(replace(gap, logged=0.0), bound) and gap.logged > 10 * bound.logged, gap


def test_the_table_has_its_cells() -> None:
    names = [cell.name for cell in CELLS]
    assert len(set(names)) == len(names), "each by a name of its own"
    parallel = [cell for cell in CELLS if cell.processes > 1 and not cell.must_fail]
    assert len(parallel) >= 40 and max(cell.processes for cell in CELLS) == 4
    assert {cell.breakage for cell in CELLS} >= {
        "doubled_scale", "shifted_labels", "flattened_batch", "masked_tokens_kept", "other_ranks_dropped",
        "local_means_logged",
    }  # fmt: skip
    assert chosen("^moe, EP2, ") and len(chosen("")) == len(CELLS)
    assert set(SHOWN_ELSEWHERE) <= {cell.name for cell in CELLS if cell.core}
