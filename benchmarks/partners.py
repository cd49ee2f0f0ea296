# SPDX-License-Identifier: Apache-2.0
"""Check that ranks agree about what they exchange: by their plans, and by the collectives that they made.

Positions are those of tokens on the sequence; a disagreement would hang a run, or mix up its tokens in silence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from benchmarks.fake_ranks import Call
from simreg_megatron.parallel.layout import Rank, RowPlan, Run, ShardLayout, merged


def disagreements(layout: ShardLayout, plans: Mapping[Rank, RowPlan]) -> Iterator[str]:
    """A sentence for every pair of ranks of whom one does not expect what the other sends, and for every rank that
    does not get what its terms need."""
    for what in ("travels", "shares_chunks", "all_anchors"):
        if len({getattr(plan, what) for plan in plans.values()}) > 1:
            yield f"ranks do not agree on {what}"
    for receiver, plan in plans.items():
        members = layout.exchange_members(receiver)
        expected = dict(zip(members, _expected(plan), strict=True))
        for sender in members:
            place = layout.exchange_members(sender).index(receiver)
            sent = _positions(layout.held(sender), plans[sender].send[place])
            if sent != expected[sender]:
                yield f"{sender} sends {sent} to {receiver}, who expects {expected[sender]}"
        at_hand = [run for runs in expected.values() for run in runs] if plan.travels else layout.held(receiver)
        missing = [need for need in plan.needs if not any(a <= need[0] and need[1] <= b for a, b in merged(at_hand))]
        if missing:
            yield f"{receiver} needs {missing} and no rank sends them"


def _positions(held: Sequence[Run], rows: Iterable[Run]) -> list[Run]:
    """Return the positions in these ranges of a rank's rows, which are the runs `held`, one after the other."""
    return _joined(found for first, last in rows for found in _slice(held, first, last))


def _expected(plan: RowPlan) -> Iterator[list[Run]]:
    """Positions that a rank takes what each member sends for, in the order of arrival."""
    placed, offset = [], 0
    for first, last in plan.order:
        placed.append((first, last, list(_slice(plan.needs, offset, offset + last - first))))
        offset += last - first
    begin = 0
    for size in plan.receive_sizes:
        end = begin + size
        parts = (_slice(runs, max(begin, a) - a, min(end, b) - a) for a, b, runs in sorted(placed))
        yield _joined(run for part in parts for run in part)
        begin = end


def _slice(runs: Sequence[Run], first: int, last: int) -> Iterator[Run]:
    """Numbers first:last of the positions in the runs, as runs."""
    offset = 0
    for start, stop in runs:
        low, high = max(first, offset), min(last, offset + stop - start)
        if low < high:
            yield start + low - offset, start + high - offset
        offset += stop - start


def _joined(runs: Iterable[Run]) -> list[Run]:
    """The same positions in the same order, neighbours made one run."""
    found: list[Run] = []
    for first, last in runs:
        if found and found[-1][1] == first:
            found[-1] = found[-1][0], last
        else:
            found.append((first, last))
    return found


def mismatches(calls: Mapping[int, list[Call]]) -> Iterator[str]:
    """A sentence for every collective that the ranks of its group, by their number, do not make alike."""
    for rank, own in calls.items():
        for group in {call.ranks for call in own}:
            mine = [call for call in own if call.ranks == group]
            for other in group:
                theirs = [call for call in calls[other] if call.ranks == group]
                if len(mine) != len(theirs):
                    yield f"{rank} makes {len(mine)} collectives among {group}, {other} {len(theirs)}"
                for one, two in zip(mine, theirs, strict=False):
                    if not _fits(one, two, group.index(rank), group.index(other)):
                        yield f"{rank} and {other} do not fit: {one} and {two}"


def _fits(one: Call, two: Call, place: int, other: int) -> bool:
    if one.kind != two.kind:
        return False
    return one.sends[other] == two.receives[place] if one.sends else one.size == two.size
