# SPDX-License-Identifier: Apache-2.0
"""Positions of tokens and exchanges, by plain arithmetic: every token once, every plan with its counterpart."""

import itertools

import pytest
import torch

from simreg_megatron.parallel.layout import ChunkRules, ShardLayout, row_plan
from simreg_megatron.parallel.sequence import EndTokens, PackedLengths
from tests.distributed.test_packed import thd_get_partitioned_indices

SIZES = [(c, t, split) for c, t, split in itertools.product((1, 2, 4), (1, 2, 3, 4), (True, False))]
PACKED = (0, 8, 32, 80, 96)  # four documents


def layouts(length: int = 96) -> list[ShardLayout]:
    return [ShardLayout(length, *sizes, cu_seqlens) for sizes in SIZES for cu_seqlens in (None, PACKED)]


def ranks(layout: ShardLayout) -> list[tuple[int, int]]:
    return list(itertools.product(range(layout.context_size), range(layout.tensor_size)))


def positions(runs) -> list[int]:
    return [position for first, last in runs for position in range(first, last)]


@pytest.mark.parametrize("layout", layouts(), ids=str)
def test_every_token_is_the_anchor_of_one_rank(layout: ShardLayout) -> None:
    anchors = [position for rank in ranks(layout) for position in positions(layout.anchors(rank))]
    assert sorted(anchors) == list(range(96))
    for rank in ranks(layout):
        assert set(positions(layout.anchors(rank))) <= set(positions(layout.held(rank)))


@pytest.mark.parametrize("layout", layouts(), ids=str)
def test_what_all_ranks_hold_restores_the_sequence(layout: ShardLayout) -> None:
    rank = ranks(layout)[-1]
    concatenated = [p for member in layout.exchange_members(rank) for p in positions(layout.held(member))]
    restored = [concatenated[i] for i in positions(layout.gathered_order)]
    assert restored == list(range(96))


@pytest.mark.parametrize("layout", layouts(), ids=str)
@pytest.mark.parametrize("cutting", [*map(ChunkRules, (0, 8, 20)), ChunkRules(20, sample_length=32)], ids=str)
def test_every_chunk_that_a_rank_needs_arrives_whole_and_in_order(layout: ShardLayout, cutting: ChunkRules) -> None:
    size = cutting.chunk_size or 96
    sample = cutting.sample_length or 96
    for rank in ranks(layout):
        plan = row_plan(layout, rank, cutting)
        received = []
        for member in layout.exchange_members(rank):
            theirs = row_plan(layout, member, cutting)
            place = layout.exchange_members(member).index(rank)
            held = positions(layout.held(member))
            sent = [held[i] for i in positions(theirs.send[place])]
            assert len(sent) == plan.receive_sizes[layout.exchange_members(rank).index(member)]
            received += sent
        assert [received[i] for i in positions(plan.order)] == positions(plan.needs)
        for window in plan.windows:
            for anchor in range(*window.anchors):
                origin = anchor // sample * sample
                first = origin + (anchor - origin) // size * size
                chunk = range(first, min(first + size, origin + sample))
                assert set(chunk) <= set(range(*window.tokens)) <= set(positions(plan.needs))
                assert (window.tokens[0] - origin) % size == 0


def test_zigzag() -> None:
    assert ShardLayout(16, 2, 1).held((0, 0)) == ((0, 4), (12, 16))
    assert ShardLayout(16, 2, 1).held((1, 0)) == ((4, 8), (8, 12))
    assert ShardLayout(16, 2, 2).held((0, 1)) == ((12, 16),)


@pytest.mark.parametrize(("size", "rank"), [(size, rank) for size in (2, 4) for rank in range(size)])
def test_documents_are_cut_as_transformer_engine_cuts_them(size: int, rank: int) -> None:
    expected = thd_get_partitioned_indices(torch.tensor(PACKED), 96, size, rank).tolist()
    assert positions(ShardLayout(96, size, cu_seqlens=PACKED).held((rank, 0))) == expected
    assert positions(ShardLayout(96, size).held((rank, 0))) != expected


@pytest.mark.parametrize("cu_seqlens", [(0, 8, 30, 96), (0, 8, 88), (8, 96), (0, 8, 4, 96)])
def test_documents_that_cannot_be_cut_are_refused(cu_seqlens: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"4 equal blocks, so cu_seqlens .* 0 to 96 in multiples of 4, but are \["):
        ShardLayout(96, 2, cu_seqlens=cu_seqlens)


def test_documents_from_packing_lengths() -> None:
    cu_seqlens = torch.tensor([0, 5, 6, 20], dtype=torch.int32)
    numbers = PackedLengths(cu_seqlens).of(torch.zeros(1, 10, dtype=torch.long), (3, 13))
    assert numbers.tolist() == [[1, 1, 2, 3, 3, 3, 3, 3, 3, 3]]


def test_documents_from_end_tokens_agree_with_megatrons_position_ids() -> None:
    """Megatron restarts positions behind each end token in the input; the labels are the inputs one later."""
    inputs, end = [1, 2, 5, 3, 4, 6, 5, 5, 7, 8], 5
    numbers = EndTokens(end).of(torch.tensor([[*inputs[1:], 9]]), (0, 10))[0]
    assert numbers.tolist() == [inputs[:place].count(end) for place in range(10)]


def test_more_ranks_than_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot share 2 tokens among 4 tensor-parallel ranks"):
        ShardLayout(4, 2, 4)
