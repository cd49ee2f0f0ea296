# SPDX-License-Identifier: Apache-2.0
"""A bounded sample of a micro-batch's tokens: every k-th position, so the same one however sequences are cut.

Shapes: B micro-batch, S tokens whose states are here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from simreg_megatron.parallel.layout import Rank
from simreg_megatron.parallel.shard import SequenceShard


@dataclass(frozen=True)
class EveryKth:
    """Positions 0, k, 2k, ... of each sequence, as they lie over the ranks that share it."""

    shard: SequenceShard
    step: int

    @classmethod
    def of_at_most(cls, number: int, num_sequences: int, shard: SequenceShard) -> EveryKth:
        """About `number` tokens of the micro-batch at most, over all those ranks."""
        return cls(shard, -(-num_sequences * shard.layout.length // number))

    def taken(self, per_row: Tensor) -> Tensor:
        """Select from [B, S, ...] this rank's own tokens that are in the sample."""
        own = self.shard.own_columns(per_row)
        return torch.cat([own[:, part] for part in self._slices(self.shard.rank)], dim=1)

    def most_of_a_tensor_rank(self) -> int:
        """Tokens of a sequence in the sample on the tensor-parallel rank that has most of them."""
        ranks = [(self.shard.rank[0], tensor_rank) for tensor_rank in range(self.shard.layout.tensor_size)]
        return max(sum(len(range(*part.indices(part.stop))) for part in self._slices(rank)) for rank in ranks)

    def _slices(self, rank: Rank) -> list[slice]:
        """Among a rank's own tokens: as slices, which need to know no value."""
        found, offset = [], 0
        for first, last in self.shard.layout.anchors(rank):
            found.append(slice(offset + -first % self.step, offset + last - first, self.step))
            offset += last - first
        return found
