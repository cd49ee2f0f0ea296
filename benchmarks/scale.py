# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.scale [--output FILE.csv]`: what ranks of large runs send for SimReg, without the ranks.

The plugin's own code runs a micro-batch forward and backward as every rank that shares its sequences, one after the
other, on tensors that have a device (CUDA) and no memory, in process groups of up to 1024 ranks that move nothing.
Every collective is kept with its bytes. Bytes received are those that come from other ranks if each part is sent once
(as in a ring); memory is the peak of the step without the model's own tensors, with the gradient of the rank's rows, on
the rank that receives most. Where a rank has more than MOST_PAIRS pairs, memory lacks what tiles take, which the budget
in simreg_megatron/kernels/torch.py bounds.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import records
from benchmarks.fake_autograd import backward
from benchmarks.fake_ranks import Call, Collectives, Layout, LiveBytes, as_rank
from benchmarks.launches import step_of
from benchmarks.records import Record
from launch.dry_run import ASSUMED_VOCABULARY
from simreg_megatron.config import SimRegConfig
from simreg_megatron.kernels import torch as tiles
from simreg_megatron.parallel.layout import Rank, ShardLayout

LAYOUTS = (
    Layout(tensor=8),
    Layout(tensor=8, sequence_parallel=True),
    Layout(context=2, data=4),
    Layout(context=8),
    Layout(tensor=2, context=2, data=2, sequence_parallel=True),
    Layout(tensor=4, context=2),
    Layout(tensor=8, context=8, sequence_parallel=True),
    Layout(tensor=8, context=2, data=16, pipeline=4, sequence_parallel=True),
)
SIZES = ((16, 2048, 1024), (2, 2048, 4096), (1, 8192, 4096), (1, 32768, 8192), (1, 131072, 8192))
"""Sequences, tokens, width; the first two are the presets' micro-batches of 350M and 7B."""
CHUNKS = (1024, 0)
BETWEEN = 8192
"""Tokens in a chunk, where sequences are long enough to ask for something between the two."""
MOST_PAIRS = 1 << 30
"""Of a rank, whose tiles are gone through one by one in a minute."""
LONGEST_LOGGED = 8192
"""Likewise, of sequences: what a log step describes is of pairs, too."""


@dataclass(frozen=True)
class Case:
    """A micro-batch in a layout."""

    layout: Layout
    batch: int
    length: int
    width: int
    chunk: int
    logs: bool = False

    @property
    def shard(self) -> ShardLayout:
        rows_split = self.layout.sequence_parallel and self.layout.tensor > 1
        return ShardLayout(self.length, self.layout.context, self.layout.tensor, rows_split)

    def __str__(self) -> str:
        chunk = f"chunk {self.chunk or 'whole'}{', log step' if self.logs else ''}"
        return f"{self.layout}, {self.batch} x {self.length} x {self.width}, {chunk}"


class Sent(NamedTuple):
    """The collectives of one rank in a micro-batch."""

    forward: list[Call]
    backward: list[Call]

    @property
    def calls(self) -> list[Call]:
        return [*self.forward, *self.backward]

    @property
    def received(self) -> int:
        """Bytes."""
        return sum(call.received for call in self.calls)


def sent_by(case: Case, rank: Rank) -> Sent:
    with as_rank(case.layout, rank) as groups, _tiles_shut(), FakeTensorMode():
        step = _step(case, rank, groups)
        with Collectives() as in_forward:
            result = step()
        with Collectives() as in_backward:
            backward(result, torch.ones_like(result))
    return Sent(in_forward.calls, in_backward.calls)


def memory_of(case: Case, rank: Rank, *, tiles: bool = True) -> int:
    """Peak of bytes; without its tiles, whose number grows with that of the pairs, of what is outside them."""
    with as_rank(case.layout, rank) as groups, contextlib.nullcontext() if tiles else _tiles_shut(), FakeTensorMode():
        step = _step(case, rank, groups)
        with LiveBytes() as live:
            result = step()
            backward(result, torch.ones_like(result))
    return live.most


def _step(case: Case, rank: Rank, groups: SimpleNamespace) -> Callable[[], Tensor]:
    config = SimRegConfig(lambda_="auto", chunk_size=case.chunk, impl="tiled")
    rows = sum(last - first for first, last in case.shard.held(rank))
    vocabulary = ASSUMED_VOCABULARY // case.layout.tensor
    return step_of(config, groups, (rows, case.batch, case.width), case.shard.context_tokens, vocabulary, case.logs)


@contextlib.contextmanager
def _tiles_shut() -> Iterator[None]:
    """Without the work inside of tiles: sums are zeros, and a gradient is memory."""
    without_tiles = mock.patch.object(tiles._Chunks, "tiles", lambda *_: iter(()))
    with without_tiles, mock.patch.object(tiles, "_add_up_gradient", lambda *_: None):
        yield


def cases() -> Iterator[Case]:
    for layout in LAYOUTS:
        for batch, length, width in SIZES:
            chunks = (*CHUNKS, BETWEEN) if length > 8 * BETWEEN else CHUNKS
            for chunk in chunks:
                yield Case(layout, batch, length, width, chunk)


def sent_by_all(case: Case) -> dict[Rank, Sent]:
    """By every rank that shares the sequences.

    Raises:
        RuntimeError: two ranks do not make the same collectives in the same order.
    """
    sent = {rank: sent_by(case, rank) for rank in case.layout.ranks_of_a_sequence}
    if len({tuple(described(case, rank, own.calls, sizes=False)) for rank, own in sent.items()}) > 1:
        raise RuntimeError(f"{case}: ranks make their collectives in different orders")
    return sent


def described(case: Case, rank: Rank, calls: Iterable[Call], *, sizes: bool = True) -> Iterator[str]:
    """Kind, group and bytes received of each."""
    layout, (context, tensor) = case.layout, rank
    named = {
        tuple(layout.number(member) for member in layout.ranks_of_a_sequence): "TP x CP",
        tuple(layout.number((other, tensor)) for other in range(layout.context)): "CP",
        tuple(layout.number((context, other)) for other in range(layout.tensor)): "TP",
    }
    for call in calls:
        yield f"{call.kind} over {named[call.ranks]}" + (f": {call.received}" if sizes else "")


def row_of(case: Case) -> dict[str, Any]:
    """Measure the rank that receives most."""
    by_rank = sent_by_all(case)
    rank = max(by_rank, key=lambda each: by_rank[each].received)
    pairs = case.batch * case.shard.context_tokens // case.layout.tensor * (case.chunk or case.length)
    walks = pairs <= MOST_PAIRS
    sent = by_rank[rank]
    return {
        "layout": str(case.layout), "ranks": case.layout.num_ranks, "batch": case.batch, "tokens": case.length,
        "width": case.width, "chunk": case.chunk or "whole", "context_rank": rank[0], "tensor_rank": rank[1],
        "collectives": len(sent.calls), "bytes_received": sent.received,
        "forward": "; ".join(described(case, rank, sent.forward)),
        "backward": "; ".join(described(case, rank, sent.backward)), "log_step": _in_log_step(case, rank, sent),
        "tiles": "yes" if walks else "no", "memory_mib": f"{memory_of(case, rank, tiles=walks) / 2**20:.1f}",
    }  # fmt: skip


def _in_log_step(case: Case, rank: Rank, sent: Sent) -> str:
    """The collectives that a log step adds to the forward; of long sequences they are the same, and not looked at."""
    if case.length > LONGEST_LOGGED:
        return ""
    return "; ".join(described(case, rank, sent_by(replace(case, logs=True), rank).forward[len(sent.forward) :]))


def rows() -> Iterator[dict[str, Any]]:
    for case in cases():
        print(case, file=sys.stderr, flush=True)
        yield row_of(case)


def table(lines: list[Record]) -> Iterator[str]:
    yield f"{records.described(lines)}. `python -m benchmarks.scale`"
    yield ""
    yield "Collectives are those of the forward + those of the backward."
    yield ""
    columns = "collectives | MiB received | MiB of memory"
    yield f"| layout | ranks | micro-batch | chunks of 1024: {columns} | whole sequences: {columns} |"
    yield "| --- " * 9 + "|"
    by_size: dict[tuple[str, ...], dict[str, Record]] = {}
    for line in lines:
        size = f"{line['batch']} x {line['tokens']} x {line['width']}"
        by_size.setdefault((line["layout"], line["ranks"], size), {})[line["chunk"]] = line
    for size, by_chunk in by_size.items():
        cells = [cell for chunk in ("1024", "whole") for cell in _cells(by_chunk[chunk])]
        yield f"| {' | '.join((*size, *cells))} |"


def _cells(line: Record) -> tuple[str, ...]:
    in_forward, in_backward = (len(list(filter(None, line[name].split(";")))) for name in ("forward", "backward"))
    received = int(line["bytes_received"]) / 2**20
    return f"{in_forward} + {in_backward}", f"{received:.1f}", f"{float(line['memory_mib']):.0f}"


if __name__ == "__main__":
    records.command("scale", __doc__, rows, table)
