# SPDX-License-Identifier: Apache-2.0
"""Which positions of the sequence this rank holds, and the term of its tokens.

Context parallelism cuts a sequence into 2*cp blocks and gives rank r the blocks r and 2*cp-1-r (zigzag);
sequence parallelism cuts what a context rank holds into tp contiguous parts.

Shapes: S tokens of this rank, T tokens of the whole sequence, B micro-batch, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from simreg_megatron.parallel.autograd import gather_sequence

Run = tuple[int, int]  # first position and one past the last, contiguous on the sequence
TokenLoss = Callable[[Tensor, Tensor, Tensor], Tensor]  # (embeddings BSD, labels BS, valid BS) -> terms BS


@dataclass(frozen=True)
class SequenceShard:
    """The part of each sequence that one rank holds.

    Attributes:
        length: tokens in the whole sequence.
        sequence_group: ranks that split it by sequence parallelism; None where hidden states are whole.
        context_group: ranks that split it by context parallelism; None where there is one.
    """

    length: int
    sequence_group: dist.ProcessGroup | None = None
    context_group: dist.ProcessGroup | None = None

    @cached_property
    def layout(self) -> ShardLayout:
        return ShardLayout(self.length, _size(self.context_group), _size(self.sequence_group))

    @property
    def runs(self) -> tuple[Run, ...]:
        """The contiguous pieces this rank holds, in the order of its rows."""
        return self.layout.runs(_rank(self.context_group), _rank(self.sequence_group))

    @property
    def start(self) -> int:
        """First column, among the tokens of this context rank, of the hidden states held here."""
        return self.layout.rows * _rank(self.sequence_group)

    @property
    def replicas(self) -> int:
        """How many ranks see the same gathered sequence."""
        return _size(self.context_group) * _size(self.sequence_group)

    def own_columns(self, per_token: Tensor) -> Tensor:
        """Cut a [B, tokens of the context rank] tensor to the tokens whose hidden states are here."""
        return per_token[:, self.start : self.start + self.layout.rows]

    def terms_in_place(self, token_loss: TokenLoss, embeddings: Tensor, labels: Tensor, valid: Tensor) -> Tensor:
        """Terms of this rank's tokens, every run by itself; nothing travels. All [B, S(, D)]."""
        lengths = [stop - first for first, stop in self.runs]
        parts = (part.split(lengths, dim=1) for part in (embeddings, labels, valid))
        return torch.cat([token_loss(*run) for run in zip(*parts, strict=True)], dim=1)

    def whole_sequence(self, embeddings: Tensor, labels: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Bring the whole sequence here in its own order: [B, S(, D)] of each rank -> [B, T(, D)]."""
        return tuple(self._gathered(part) for part in (embeddings, labels, valid))  # type: ignore[return-value]

    def own_part(self, whole: Tensor) -> Tensor:
        """Cut [B, T] to this rank's tokens, in the order of its rows."""
        return torch.cat([whole[:, first:stop] for first, stop in self.runs], dim=1)

    def _gathered(self, local_BS: Tensor) -> Tensor:
        rows = local_BS.transpose(0, 1).contiguous()
        is_mask = rows.dtype == torch.bool
        rows = rows.to(torch.uint8) if is_mask else rows  # gloo and NCCL move no booleans
        for group in (self.sequence_group, self.context_group):
            rows = rows if group is None else gather_sequence(rows, group)
        rows = rows.bool() if is_mask else rows
        return torch.cat([rows[first:stop] for first, stop in self.layout.gathered_order], dim=0).transpose(0, 1)


@dataclass(frozen=True)
class ShardLayout:
    """How one sequence of `length` tokens lies over context (zigzag) and sequence-parallel (contiguous) ranks."""

    length: int
    context_size: int
    sequence_size: int

    @property
    def rows(self) -> int:
        """Tokens on each rank."""
        return self.length // (self.context_size * self.sequence_size)

    def runs(self, context_rank: int, sequence_rank: int) -> tuple[Run, ...]:
        """Contiguous pieces of the sequence on one rank, in the order of its rows."""
        first, last = sequence_rank * self.rows, (sequence_rank + 1) * self.rows
        pieces, offset = [], 0
        for start, stop in self._context_blocks(context_rank):
            low, high = max(first, offset), min(last, offset + stop - start)
            if low < high:
                pieces.append((start + low - offset, start + high - offset))
            offset += stop - start
        return tuple(pieces)

    def _context_blocks(self, context_rank: int) -> tuple[Run, ...]:
        if self.context_size == 1:
            return ((0, self.length),)
        block = self.length // (2 * self.context_size)
        mirrored = 2 * self.context_size - 1 - context_rank
        return tuple((index * block, (index + 1) * block) for index in (context_rank, mirrored))

    @cached_property
    def gathered_order(self) -> tuple[Run, ...]:
        """Row ranges of the rank-ordered concatenation that, taken one after the other, restore the sequence."""
        ranges, offset = [], 0
        for context_rank in range(self.context_size):
            for start, stop in self._context_blocks(context_rank):
                ranges.append((start, (offset, offset + stop - start)))
                offset += stop - start
        return tuple(rows for _, rows in sorted(ranges))

    def chunks_stay_on_ranks(self, chunk_size: int) -> bool:
        """Whether chunks cut on the sequence lie each inside one run of one rank (the same answer on all ranks)."""
        if self.context_size * self.sequence_size == 1:
            return True
        if chunk_size == 0:
            return False
        runs = (run for c in range(self.context_size) for s in range(self.sequence_size) for run in self.runs(c, s))
        return all(first % chunk_size == 0 and (stop % chunk_size == 0 or stop == self.length) for first, stop in runs)


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


def _rank(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else group.rank()
