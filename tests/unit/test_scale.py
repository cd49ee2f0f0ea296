# SPDX-License-Identifier: Apache-2.0
"""Large layouts without their machines: all ranks agree about what travels, and equals benchmarks/results/scale.csv."""

from dataclasses import replace

import pytest

from benchmarks import records, scale
from benchmarks.fake_ranks import Layout
from benchmarks.records import RESULTS
from benchmarks.scale import LAYOUTS, Case, described, memory_of, sent_by, sent_by_all
from simreg_megatron.parallel.layout import ChunkRules, row_plan
from tests.helpers.old_torch import OLD_TORCH
from tests.helpers.quick import quick

REASON = "an older torch asks for a driver when it frees CUDA tensors without memory"
pytestmark = pytest.mark.skipif(OLD_TORCH, reason=REASON)
CASES = list(scale.cases())
KEPT = records.read(RESULTS / "scale.csv")
SMALL = Case(Layout(tensor=2, context=2, data=2, sequence_parallel=True), 2, 2048, 4096, chunk=1024)
LARGEST = Case(LAYOUTS[-1], 2, 2048, 4096, chunk=1024)


ONE_OF_EACH_LAYOUT = [Case(layout, 2, 2048, 4096, chunk=1024) for layout in LAYOUTS]


def kept_line(case: Case) -> dict[str, str]:
    own = {"layout": case.layout, "batch": case.batch, "tokens": case.length, "width": case.width}
    own["chunk"] = case.chunk or "whole"
    found = [line for line in KEPT if all(line[name] == str(value) for name, value in own.items())]
    assert len(found) == 1, f"the table has {len(found)} lines of {case}: python -m benchmarks.scale"
    return found[0]


SOME_CASES = quick(CASES, lambda case: (case.length, case.width) == (2048, 4096))


@pytest.mark.parametrize("case", SOME_CASES, ids=str)
def test_collectives_and_bytes_are_those_of_the_table(case: Case) -> None:
    """After a change that means to send something else: `python -m benchmarks.scale`."""
    kept = kept_line(case)
    rank = int(kept["context_rank"]), int(kept["tensor_rank"])
    sent = sent_by(case, rank)
    found = {name: "; ".join(described(case, rank, calls)) for name, calls in zip(sent._fields, sent, strict=True)}
    assert found == {name: kept[name] for name in found}, str(case)
    assert len(sent.calls) == int(kept["collectives"]) and sent.received == int(kept["bytes_received"])


LOGGED = quick(ONE_OF_EACH_LAYOUT, lambda case: case.layout in (SMALL.layout, LARGEST.layout))


@pytest.mark.parametrize("case", LOGGED, ids=str)
def test_a_log_step_adds_what_the_table_says(case: Case) -> None:
    kept, log_step = kept_line(case), replace(case, logs=True)
    rank = int(kept["context_rank"]), int(kept["tensor_rank"])
    plain, logged = sent_by(case, rank), sent_by(log_step, rank)
    first = len(plain.forward)
    assert logged.forward[:first] == plain.forward and logged.backward == plain.backward
    assert "; ".join(described(case, rank, logged.forward[first:])) == kept["log_step"]
    assert memory_of(case, rank) / 2**20 == pytest.approx(float(kept["memory_mib"]), rel=0.01)


EVERY_RANK = [SMALL, replace(SMALL, chunk=0), Case(Layout(4, 2), 16, 2048, 1024, 1024)]


@pytest.mark.parametrize("case", quick([*EVERY_RANK, *CASES], lambda case: case in EVERY_RANK), ids=str)
def test_all_ranks_make_matching_collectives(case: Case) -> None:
    sent = sent_by_all(case)
    assert len(sent) == case.layout.tensor * case.layout.context
    assert all(found.calls for found in sent.values()) or case not in EVERY_RANK


@pytest.mark.parametrize("layout", [one for one in LAYOUTS if one.sequence_parallel or one.tensor == 1], ids=str)
@pytest.mark.parametrize("length", [2048, pytest.param(131072, marks=pytest.mark.slow)])
def test_recommended_chunks_send_nothing(layout: Layout, length: int) -> None:
    parts = layout.tensor * layout.context if layout.sequence_parallel else 2 * layout.context
    case = Case(layout, 1, length, 1024, chunk=length // parts)
    assert sent_by(case, (0, 0)).calls == []
    for rank in layout.ranks_of_a_sequence:
        assert not row_plan(case.shard, rank, ChunkRules(case.chunk)).travels
        assert row_plan(case.shard, rank, ChunkRules(2 * case.chunk)).travels, "and it is the largest"
