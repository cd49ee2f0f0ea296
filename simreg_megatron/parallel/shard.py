# SPDX-License-Identifier: Apache-2.0
"""This rank's part of each sequence: its own rows, the rows it must see, and tensors addressed by position.

Shapes: S rows of this rank, T tokens of the whole sequence, N tokens in view, B micro-batch, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from simreg_megatron.losses._chunks import at_least_float32
from simreg_megatron.parallel.collectives import all_to_all_rows, exchange_rows, gather_tokens, share_work
from simreg_megatron.parallel.layout import Rank, RowPlan, Run, ShardLayout, merged


@dataclass(frozen=True)
class Located:
    """A tensor of some runs of the sequence, addressed by position on the sequence.

    Attributes:
        values: [B, N, ...]; the columns are the runs, one after the other.
        runs: ascending, none adjacent to the next.
    """

    values: Tensor
    runs: tuple[Run, ...]

    def at(self, run: Run) -> Tensor:
        """Return the columns of `run`, which must lie inside one of the runs that are here."""
        if self.runs == (run,):
            return self.values
        offset = 0
        for first, last in self.runs:
            if first <= run[0] and run[1] <= last:
                start = offset + run[0] - first
                return self.values[:, start : start + run[1] - run[0]]
            offset += last - first
        raise IndexError(f"positions {run} are not all in {self.runs}")


@dataclass(frozen=True)
class SequenceShard:
    """One rank among those that share the sequences of a micro-batch.

    Attributes:
        layout: how a sequence lies over them.
        rank: this one.
        row_group: ranks that hold other rows of the same sequences, ordered as `layout.exchange_members`; or None.
        tensor_group: ranks that split a context rank's tokens, or the work on them; or None.
    """

    layout: ShardLayout
    rank: Rank = (0, 0)
    row_group: dist.ProcessGroup | None = None
    tensor_group: dist.ProcessGroup | None = None

    @cached_property
    def held_runs(self) -> tuple[Run, ...]:
        """The runs of this rank, with adjacent ones joined."""
        return merged(self.layout.held(self.rank))

    @cached_property
    def num_rows(self) -> int:
        return sum(last - first for first, last in self.held_runs)

    @cached_property
    def start(self) -> int:
        """First of this rank's anchors among the tokens of its context rank."""
        return self.layout.part_start(self.rank[1])

    @property
    def anchor_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Groups over which sums over this rank's anchors become sums over the sequence, one after the other."""
        by_tensor_rank = None if self.layout.rows_split else self.tensor_group
        return tuple(group for group in (self.row_group, by_tensor_rank) if group is not None)

    def held_columns(self, per_token: Tensor) -> Tensor:
        """Cut [B, tokens of the context rank] to the tokens whose hidden states are here."""
        return per_token[:, self.start : self.start + self.num_rows] if self.layout.rows_split else per_token

    def anchor_columns(self, per_row: Tensor) -> Tensor:
        """Cut [B, S] to the tokens whose terms are computed here."""
        if self.layout.rows_split or self.layout.tensor_size == 1:
            return per_row
        return per_row[:, self.start : self.layout.part_start(self.rank[1] + 1)]

    def gather_rows(self, rows_SBD: Tensor, plan: RowPlan) -> Located:
        """Return the rows that this rank's anchors meet, [B, N, D], at least float32; gradients go to their owners."""
        if self.tensor_group is not None and not self.layout.rows_split:
            rows_SBD = share_work(rows_SBD, self.tensor_group)
        if plan.travels and self.row_group is not None:
            rows, runs = exchange_rows(rows_SBD, plan, self.row_group), plan.needs
        else:
            rows, runs = at_least_float32(rows_SBD), self.held_runs
        return Located(rows.transpose(0, 1), runs)

    def gather_rows_detached(self, rows_SBD: Tensor, plan: RowPlan) -> Located:
        """Return the same rows in their own type and without a gradient."""
        rows, runs = rows_SBD.detach(), self.held_runs
        if plan.travels and self.row_group is not None:
            rows, runs = all_to_all_rows(rows, plan, self.row_group), plan.needs
        return Located(rows.transpose(0, 1), runs)

    def from_all_anchors(self, of_anchors: Tensor) -> Tensor:
        """Collect the results of all ranks' anchors [A, B, ...] for the rows that this rank holds [S, B, ...].

        Ranks that hold the same rows get the same bits.
        """
        if self.tensor_group is None or self.layout.rows_split:
            return of_anchors
        whole = of_anchors.new_zeros(self.num_rows, *of_anchors.shape[1:])
        whole[self.start : self.start + of_anchors.shape[0]] = of_anchors
        dist.all_reduce(whole, group=self.tensor_group)  # each number plus zeros: exact in any type and order
        return whole

    def located(self, per_row: Tensor) -> Located:
        """Wrap [B, S, ...] of this rank's rows."""
        return Located(per_row, self.held_runs)

    def gather_all(self, per_row: Tensor) -> Located:
        """Gather numbers [B, S, ...] of this rank's rows into [B, T, ...] of all; no gradient."""
        if self.row_group is None:
            return self.located(per_row)
        tokens = gather_tokens(per_row.transpose(0, 1), self.layout.gathered_order, self.row_group)
        return Located(tokens.transpose(0, 1), ((0, self.layout.length),))


@dataclass(frozen=True)
class EveryKth:
    """A sample of the tokens: positions 0, k, 2k, ... of each sequence, the same ones in every parallel layout."""

    shard: SequenceShard
    step: int

    @classmethod
    def at_most(cls, number: int, num_sequences: int, shard: SequenceShard) -> EveryKth:
        """Take at most about `number` tokens of the micro-batch, over all ranks that share its sequences."""
        return cls(shard, -(-num_sequences * shard.layout.length // number))

    def select(self, per_row: Tensor) -> Tensor:
        """Select from [B, S, ...] this rank's own tokens that are in the sample."""
        columns = self.shard.anchor_columns(per_row)
        return torch.cat([columns[:, part] for part in self._slices(self.shard.rank)], dim=1)

    def max_per_tensor_rank(self) -> int:
        """Return the largest number of sampled tokens of a sequence on one tensor-parallel rank."""
        ranks = [(self.shard.rank[0], tensor_rank) for tensor_rank in range(self.shard.layout.tensor_size)]
        return max(sum(len(range(*part.indices(part.stop))) for part in self._slices(rank)) for rank in ranks)

    def _slices(self, rank: Rank) -> list[slice]:
        """Cut a rank's own tokens by slices, which need no values from the device."""
        slices, offset = [], 0
        for first, last in self.shard.layout.anchors(rank):
            slices.append(slice(offset + -first % self.step, offset + last - first, self.step))
            offset += last - first
        return slices
