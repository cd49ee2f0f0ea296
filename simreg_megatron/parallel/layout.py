# SPDX-License-Identifier: Apache-2.0
"""Layout of a sequence over ranks: where tokens lie, which rank computes which term, which rows travel. Integers only.

Context parallelism cuts a sequence into 2*cp blocks and gives context rank r the blocks r and 2*cp-1-r (zigzag). In a
row that packs documents it cuts each document so, and a rank's blocks lie in the order of the documents; or it gives
each rank one contiguous part of the row.
Of what a context rank has, sequence parallelism gives each tensor rank one contiguous part; without it every tensor
rank holds all rows, and only the work is split into such parts.

Everything here follows from sizes that all ranks know, so all ranks come to the same answer without talking. Runs of
all ranks are planned together, as arrays: packed rows have many, and others in each micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Run = tuple[int, int]  # first position and one past the last, contiguous on the sequence
Rank = tuple[int, int]  # (context rank, tensor rank)
Ints = NDArray[np.int64]  # runs are [R, 2]


@dataclass(frozen=True)
class ShardLayout:
    """Layout of one sequence of `length` tokens over context ranks and tensor ranks.

    Attributes:
        length: tokens in the whole sequence (in a packed batch: in the whole pack).
        context_size: ranks that split it by context parallelism.
        tensor_size: ranks that split a context rank's tokens, or the work on them.
        rows_split: whether tensor ranks hold a part of the rows each (sequence parallelism), or all of them.
        cu_seqlens: where documents begin, and the row's end, if context parallelism cuts each; None: it cuts the row.
        contiguous: context ranks hold one part of the row each, instead of two blocks.
    """

    length: int
    context_size: int = 1
    tensor_size: int = 1
    rows_split: bool = True
    cu_seqlens: tuple[int, ...] | None = None
    contiguous: bool = False

    def __post_init__(self) -> None:
        if self.context_tokens < self.tensor_size:
            raise ValueError(
                f"SimReg cannot share {self.context_tokens} tokens among {self.tensor_size} tensor-parallel ranks: "
                "use longer sequences or a smaller tensor-parallel size"
            )
        if self.cu_seqlens is not None:
            self._check_documents(self.cu_seqlens)

    def _check_documents(self, cu_seqlens: tuple[int, ...]) -> None:
        blocks, lengths = 2 * self.context_size, np.diff(cu_seqlens)
        if (cu_seqlens[0], cu_seqlens[-1]) != (0, self.length) or (lengths <= 0).any() or (lengths % blocks).any():
            raise ValueError(
                f"context parallelism cuts each packed document into {blocks} equal blocks, so cu_seqlens must go from "
                f"0 to {self.length} in multiples of {blocks}, but are {list(cu_seqlens)}: pad documents to such sizes"
            )

    @cached_property
    def context_tokens(self) -> int:
        """Tokens of each context rank."""
        return self.length // self.context_size

    def held(self, rank: Rank) -> tuple[Run, ...]:
        """Return the runs whose hidden states a rank holds, in the order of its rows."""
        return self.anchors(rank) if self.rows_split else _tuples(self._blocks[rank[0]])

    def anchors(self, rank: Rank) -> tuple[Run, ...]:
        """Return the runs whose terms a rank computes, in the order of its rows; every token is on one rank."""
        runs, owners = self.all_anchors
        return _tuples(runs[owners == rank[0] * self.tensor_size + rank[1]])

    def part_start(self, tensor_rank: int) -> int:
        """Return the first of the context rank's tokens that belongs to this tensor rank."""
        return tensor_rank * self.context_tokens // self.tensor_size

    def exchange_members(self, rank: Rank) -> tuple[Rank, ...]:
        """Return the ranks among which rows travel, in the order of their process group."""
        tensor_ranks = range(self.tensor_size) if self.rows_split else (rank[1],)
        return tuple((c, t) for c in range(self.context_size) for t in tensor_ranks)

    @cached_property
    def all_anchors(self) -> tuple[Ints, Ints]:
        """All ranks' runs, in the order of ranks and of their rows, and the number of each run's rank."""
        starts = np.append(0, np.cumsum(np.diff(self._blocks[0])))  # rows at which blocks begin, on any context rank
        parts = np.array([self.part_start(rank) for rank in range(self.tensor_size + 1)])
        cuts = np.unique(np.minimum(np.append(starts, parts), starts[-1]))
        rows, block = cuts[:-1], np.searchsorted(starts, cuts[:-1], "right") - 1
        first = self._blocks[:, block, 0] + rows - starts[block]
        owners = np.arange(self.context_size)[:, None] * self.tensor_size + np.searchsorted(parts, rows, "right") - 1
        return np.stack([first, first + np.diff(cuts)], axis=-1).reshape(-1, 2), owners.reshape(-1)

    @cached_property
    def all_held(self) -> tuple[Ints, Ints]:
        """The runs that the members of an exchange hold, likewise; the place of each run's rank among them."""
        if self.rows_split:
            return self.all_anchors
        return self._blocks.reshape(-1, 2), np.arange(self.context_size).repeat(self._blocks.shape[1])

    @cached_property
    def gathered_order(self) -> tuple[Run, ...]:
        """Ranges of the rank-ordered concatenation of all rows which, one after the other, are the sequence."""
        held, _ = self.all_held
        return _tuples(_rows(held)[held[:, 0].argsort()])

    @cached_property
    def _blocks(self) -> Ints:
        """The blocks of each context rank, [context ranks, blocks, 2] in the order of its rows."""
        if self.context_size == 1:
            return np.array([[[0, self.length]]])
        number, ranks = 2 * self.context_size, np.arange(self.context_size)
        if self.contiguous:
            return (ranks[:, None, None] + np.arange(2)) * self.context_tokens
        cu_seqlens = np.array(self.cu_seqlens or (0, self.length))[:, None]
        size = np.diff(cu_seqlens, axis=0) // number
        first = cu_seqlens[:-1] + np.stack([ranks, number - 1 - ranks], axis=1)[:, None] * size
        return np.stack([first, first + size], axis=-1).reshape(self.context_size, -1, 2)


@dataclass(frozen=True)
class ChunkRules:
    """Rules for where chunks begin and end; they are cut inside domains: samples, or what a rank holds of each.

    Attributes:
        chunk_size: tokens in a chunk; 0 is the whole domain.
        scope: "exact" cuts each sample; "local" cuts what a rank holds in one piece.
        sample_length: tokens in a sample where several lie one after the other in one row; None is one sample.
    """

    chunk_size: int
    scope: str = "exact"
    sample_length: int | None = None

    def domains(self, layout: ShardLayout) -> Ints:
        """Return the stretches in which chunks are cut from the first token on; the last of each may be short."""
        starts = np.arange(0, layout.length, self.sample_length or layout.length)
        samples = np.stack([starts, np.append(starts[1:], layout.length)], axis=1)
        if self.scope == "exact":
            return samples
        return _overlaps(np.sort(layout.all_held[0], axis=0), samples)[2]


class Window(NamedTuple):
    """Tokens that some anchors of one rank meet: whole chunks of one domain."""

    tokens: Run
    anchors: Run
    domain: Run


def _windows(layout: ShardLayout, rules: ChunkRules) -> tuple[Ints, Ints, Ints, Ints]:
    """Compute the windows' fields, in the order of ranks and of their rows, and the number of each one's rank."""
    runs, owners = layout.all_anchors
    domains = rules.domains(layout)
    run, place, anchors = _overlaps(runs, domains)
    start, stop = domains[place].T
    size = rules.chunk_size or stop - start
    first = start + (anchors[:, 0] - start) // size * size
    last = start - (start - anchors[:, 1]) // size * size
    return np.stack([first, np.minimum(last, stop)], axis=1), anchors, domains[place], owners[run]


@dataclass(frozen=True)
class RowPlan:
    """The work of one rank, and the exchange of rows before it.

    Attributes:
        windows: what the rank must see to compute its terms, in the order of its rows.
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
        return tuple(sum(last - first for first, last in ranges) for ranges in self.send)


@lru_cache(maxsize=16)  # each packed row has a plan of its own, and a large one
def row_plan(layout: ShardLayout, rank: Rank, rules: ChunkRules) -> RowPlan:
    """Make the plan of `rank`; every rank of its group makes the matching one."""
    tokens, anchors, domains, owners = _windows(layout, rules)
    members, own, exchanged = owners, rank[0] * layout.tensor_size + rank[1], owners >= 0
    windows = tuple(map(Window, *(_tuples(runs[owners == own]) for runs in (tokens, anchors, domains))))
    if not layout.rows_split:
        members, own, exchanged = owners // layout.tensor_size, rank[0], owners % layout.tensor_size == rank[1]
    needs, needers = _merged(tokens[exchanged], members[exchanged])
    held, holders = layout.all_held
    here = _overlaps(needs + needers[:, None] * layout.length, held + holders[:, None] * layout.length)[2]

    mine, needed = held[holders == own], needs[needers == own]
    need, place, sent = _overlaps(needs, mine)
    sent, receivers = _merged(sent + (_rows(mine) - mine)[place, :1], needers[need])
    splits = np.searchsorted(receivers, np.arange(holders[-1] + 2))
    piece, _, received = _overlaps(held, needed)
    sizes = np.bincount(holders[piece], np.diff(received)[:, 0], holders[-1] + 1)
    return RowPlan(
        windows=windows,
        needs=_tuples(needed),
        travels=bool(np.diff(here).sum() < np.diff(needs).sum()),
        send=tuple(_tuples(sent[first:last]) for first, last in pairwise(splits.tolist())),
        receive_sizes=tuple(sizes.astype(int).tolist()),
        order=_tuples(_rows(received)[received[:, 0].argsort()]),
        all_anchors=_tuples(anchors[anchors[:, 0].argsort()]),
        shares_chunks=bool((tokens != anchors).any()),
    )


def shared_pairs(chunk: Run, own: Run, all_anchors: Iterable[Run]) -> list[tuple[Run, Run]]:
    """Choose the pairs with anchors of other runs that the owner of `own` computes for both: (rows, columns).

    Of two runs, the pairs of the first half of the earlier one are its owner's, those of the second half the later
    one's: every pair is computed once, and every rank has half of each block that it takes part in.
    """
    others = [(max(run[0], chunk[0]), min(run[1], chunk[1])) for run in all_anchors]
    later = own[1], chunk[1]
    pairs = [((own[0], _middle(own)), later)]
    pairs += [(own, (_middle(run), run[1])) for run in others if run[0] < run[1] <= own[0]]
    return [(rows, columns) for rows, columns in pairs if rows[0] < rows[1] and columns[0] < columns[1]]


def _middle(run: Run) -> int:
    return (run[0] + run[1]) // 2


def merged(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Join the positions into as few ascending runs as possible."""
    ascending = np.array(sorted(runs))
    return _tuples(_merged(ascending, np.zeros(len(ascending), dtype=np.int64))[0])


def _merged(runs: Ints, owners: Ints) -> tuple[Ints, Ints]:
    """Join the runs of each owner into as few as possible; firsts and lasts ascend within an owner."""
    begins = np.append(True, (owners[1:] != owners[:-1]) | (runs[1:, 0] > runs[:-1, 1]))
    ends = np.append(begins[1:], True)
    return np.stack([runs[begins, 0], runs[ends, 1]], axis=1), owners[begins]


def _overlaps(runs: Ints, others: Ints) -> tuple[Ints, Ints, Ints]:
    """Intersect runs, in any order, with others, which ascend: the index of each, and the common part."""
    first = np.searchsorted(others[:, 1], runs[:, 0], side="right")
    counts = np.searchsorted(others[:, 0], runs[:, 1], side="left") - first
    run = np.arange(len(runs)).repeat(counts)
    other = np.arange(len(run)) + (first + counts - np.cumsum(counts))[run]
    both = np.maximum(runs[run, 0], others[other, 0]), np.minimum(runs[run, 1], others[other, 1])
    return run, other, np.stack(both, axis=1)


def _rows(runs: Ints) -> Ints:
    """Compute the local row ranges of runs that lie one after the other."""
    ends = np.diff(runs)[:, 0].cumsum()
    return np.stack([np.append(0, ends[:-1]), ends], axis=1)


def _tuples(runs: Ints) -> tuple[Run, ...]:
    return tuple(map(tuple, runs.tolist()))
