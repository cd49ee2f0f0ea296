# SPDX-License-Identifier: Apache-2.0
"""Where the tokens of one sequence lie, who computes whose term, and which rows must travel for it. Integers only.

Context parallelism cuts a sequence into 2*cp blocks and gives context rank r the blocks r and 2*cp-1-r (zigzag).
Of what a context rank has, sequence parallelism gives each tensor rank one contiguous part; without it every tensor
rank holds all rows, and only the work is split into such parts.

Everything here follows from sizes that all ranks know, so all ranks come to the same answer without talking.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

Run = tuple[int, int]  # first position and one past the last, contiguous on the sequence
Rank = tuple[int, int]  # (context rank, tensor rank)


@dataclass(frozen=True)
class ShardLayout:
    """How one sequence of `length` tokens lies over context ranks and tensor ranks.

    Attributes:
        length: tokens in the whole sequence (in a packed batch: in the whole pack).
        context_size: ranks that split it by context parallelism.
        tensor_size: ranks that split a context rank's tokens, or the work on them.
        rows_split: whether tensor ranks hold a part of the rows each (sequence parallelism), or all of them.
    """

    length: int
    context_size: int = 1
    tensor_size: int = 1
    rows_split: bool = True

    def __post_init__(self) -> None:
        if self.context_tokens < self.tensor_size:
            raise ValueError(
                f"SimReg cannot share {self.context_tokens} tokens among {self.tensor_size} tensor-parallel ranks: "
                "use longer sequences or a smaller tensor-parallel size"
            )

    @cached_property
    def context_tokens(self) -> int:
        """Tokens of each context rank."""
        return self.length // self.context_size

    @lru_cache(maxsize=256)  # noqa: B019  (few layouts, and as small as their key)
    def held(self, rank: Rank) -> tuple[Run, ...]:
        """The runs whose hidden states a rank holds, in the order of its rows."""
        if self.rows_split:
            return self.anchors(rank)
        return self._context_part(rank[0], 0, self.context_tokens)

    @lru_cache(maxsize=256)  # noqa: B019  (few layouts, and as small as their key)
    def anchors(self, rank: Rank) -> tuple[Run, ...]:
        """The runs whose terms a rank computes, in the order of its rows; every token is on one rank."""
        return self._context_part(rank[0], self.part_start(rank[1]), self.part_start(rank[1] + 1))

    def part_start(self, tensor_rank: int) -> int:
        """First of the context rank's tokens that belongs to this tensor rank."""
        return tensor_rank * self.context_tokens // self.tensor_size

    @lru_cache(maxsize=256)  # noqa: B019  (few layouts, and as small as their key)
    def exchange_members(self, rank: Rank) -> tuple[Rank, ...]:
        """The ranks among which rows travel, in the order of their process group."""
        tensor_ranks = range(self.tensor_size) if self.rows_split else (rank[1],)
        return tuple((c, t) for c in range(self.context_size) for t in tensor_ranks)

    def _context_part(self, context_rank: int, first: int, last: int) -> tuple[Run, ...]:
        """Tokens first:last of those a context rank has, as runs on the sequence."""
        runs, offset = [], 0
        for start, stop in self._context_blocks(context_rank):
            low, high = max(first, offset), min(last, offset + stop - start)
            if low < high:
                runs.append((start + low - offset, start + high - offset))
            offset += stop - start
        return tuple(runs)

    def _context_blocks(self, context_rank: int) -> tuple[Run, ...]:
        if self.context_size == 1:
            return ((0, self.length),)
        block = self.length // (2 * self.context_size)
        mirrored = 2 * self.context_size - 1 - context_rank
        return tuple((index * block, (index + 1) * block) for index in (context_rank, mirrored))


@dataclass(frozen=True)
class Cutting:
    """Where chunks begin and end.

    Attributes:
        chunk_size: tokens in a chunk; 0 is the whole domain.
        scope: "exact" cuts each sample; "local" cuts what a rank holds in one piece.
        sample_length: tokens in a sample where several lie one after the other in one row; None is one sample.
    """

    chunk_size: int
    scope: str = "exact"
    sample_length: int | None = None

    def domains(self, layout: ShardLayout, rank: Rank) -> tuple[Run, ...]:
        """The stretches in which chunks are cut from the first token on; the last of each may be short."""
        size = self.sample_length or layout.length
        samples = [(start, min(start + size, layout.length)) for start in range(0, layout.length, size)]
        if self.scope == "exact":
            return tuple(samples)
        return tuple(run for held in layout.held(rank) for sample in samples for run in _intersection(held, sample))


@dataclass(frozen=True)
class Window:
    """Tokens that some anchors of one rank meet: whole chunks of one domain."""

    tokens: Run
    anchors: Run
    domain: Run


def windows(layout: ShardLayout, rank: Rank, cutting: Cutting) -> tuple[Window, ...]:
    """What a rank must see to compute its terms, in the order of its rows."""
    found = []
    for run in layout.anchors(rank):
        for domain in cutting.domains(layout, rank):
            for anchors in _intersection(run, domain):
                size = cutting.chunk_size or domain[1] - domain[0]
                first = domain[0] + (anchors[0] - domain[0]) // size * size
                last = domain[0] + -(-(anchors[1] - domain[0]) // size) * size
                found.append(Window((first, min(last, domain[1])), anchors, domain))
    return tuple(found)


@dataclass(frozen=True)
class RowPlan:
    """What one rank computes, and the exchange of rows before it.

    Attributes:
        windows: in the order of the rank's rows.
        needs: runs the windows cover, merged, ascending.
        travels: whether any rank of the group needs rows that it does not hold; the same on all of them.
        send: for each member of the group, the local row ranges it is sent.
        receive_sizes: rows received from each member.
        order: ranges of the received rows which, one after the other, are `needs`.
        all_anchors: the runs of all ranks, cut at domains, ascending; each position is in one of them.
        shares_chunks: whether any chunk holds anchors of several ranks; the same on all of them.
    """

    windows: tuple[Window, ...]
    needs: tuple[Run, ...]
    travels: bool
    send: tuple[tuple[Run, ...], ...]
    receive_sizes: tuple[int, ...]
    order: tuple[Run, ...]
    all_anchors: tuple[Run, ...]
    shares_chunks: bool

    @property
    def send_sizes(self) -> tuple[int, ...]:
        return tuple(_total(ranges) for ranges in self.send)


@lru_cache(maxsize=256)
def row_plan(layout: ShardLayout, rank: Rank, cutting: Cutting) -> RowPlan:
    """The plan of `rank`; every rank of its group makes the matching one."""
    members = layout.exchange_members(rank)
    needs = {member: merged(w.tokens for w in windows(layout, member, cutting)) for member in members}
    send = tuple(tuple(local for local, _ in _shared(layout.held(rank), needs[member])) for member in members)
    received, offset, sizes = [], 0, []
    for member in members:
        before = offset
        for (start, stop), position in _shared(layout.held(member), needs[rank]):
            received.append((position, (offset, offset + stop - start)))
            offset += stop - start
        sizes.append(offset - before)
    ranks = [(c, t) for c in range(layout.context_size) for t in range(layout.tensor_size)]
    of_all = [window for other in ranks for window in windows(layout, other, cutting)]
    return RowPlan(
        windows=windows(layout, rank, cutting),
        needs=needs[rank],
        travels=any(not _covers(layout.held(member), needs[member]) for member in members),
        send=send,
        receive_sizes=tuple(sizes),
        order=tuple(rows for _, rows in sorted(received)),
        all_anchors=tuple(sorted(window.anchors for window in of_all)),
        shares_chunks=any(window.tokens != window.anchors for window in of_all),
    )


def shared_pairs(chunk: Run, own: Run, all_anchors: Iterable[Run]) -> list[tuple[Run, Run]]:
    """Which pairs with anchors of other runs the owner of `own` computes for both: (rows, columns), inside `chunk`.

    Of two runs, the pairs of the first half of the earlier one are its owner's, those of the second half the later
    one's: every pair is computed once, and every rank has half of each block that it takes part in.
    """
    others = [run for given in all_anchors for run in _intersection(given, chunk)]
    later = own[1], chunk[1]
    found = [((own[0], _middle(own)), later)]
    found += [(own, (_middle(run), run[1])) for run in others if run[1] <= own[0]]
    return [(rows, columns) for rows, columns in found if rows[0] < rows[1] and columns[0] < columns[1]]


def _middle(run: Run) -> int:
    return (run[0] + run[1]) // 2


@lru_cache(maxsize=256)
def gathered_order(layout: ShardLayout, rank: Rank) -> tuple[Run, ...]:
    """Ranges of the rank-ordered concatenation of all rows which, one after the other, are the sequence."""
    ranges, offset = [], 0
    for member in layout.exchange_members(rank):
        for start, stop in layout.held(member):
            ranges.append((start, (offset, offset + stop - start)))
            offset += stop - start
    return tuple(rows for _, rows in sorted(ranges))


def _intersection(run: Run, other: Run) -> Iterator[Run]:
    first, last = max(run[0], other[0]), min(run[1], other[1])
    if first < last:
        yield first, last


def merged(runs: Iterable[Run]) -> tuple[Run, ...]:
    """The same positions in as few ascending runs as possible."""
    stretches: list[Run] = []
    for first, last in sorted(runs):
        if stretches and first <= stretches[-1][1]:
            stretches[-1] = (stretches[-1][0], max(last, stretches[-1][1]))
        else:
            stretches.append((first, last))
    return tuple(stretches)


def _shared(held: tuple[Run, ...], needs: tuple[Run, ...]) -> Iterator[tuple[Run, int]]:
    """(local row range, its position on the sequence) of held rows that are needed, in row order."""
    offset = 0
    for run in held:
        for need in needs:
            for first, last in _intersection(run, need):
                yield (offset + first - run[0], offset + last - run[0]), first
        offset += run[1] - run[0]


def _covers(held: tuple[Run, ...], needs: tuple[Run, ...]) -> bool:
    """Whether every needed run lies inside one stretch of what is held."""
    stretches = merged(held)
    return all(any(first <= a and b <= last for first, last in stretches) for a, b in needs)


def _total(runs: Iterable[Run]) -> int:
    return sum(last - first for first, last in runs)
