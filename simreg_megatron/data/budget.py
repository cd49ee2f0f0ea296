# SPDX-License-Identifier: Apache-2.0
"""How much there is and whether it is enough, from parts that come in any order."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

from simreg_megatron.data.blocks import Block
from simreg_megatron.data.parts import PartHeader

_MARGIN = 1.05  # one shard does not see the others' tokens: it makes some parts more, which the merge leaves out


class Reckoning:
    """Tokens and bytes of the parts that are there.

    Args:
        budget: tokens of the training side; None takes all there is.
        sizes: bytes of each input, 0 where unknown.
        shards: machines that share the work.
    """

    def __init__(self, budget: int | None, sizes: Sequence[int], *, shards: int = 1) -> None:
        self.budget = budget
        self.total_bytes = sum(sizes)
        self.tokens = self.bytes = 0
        self._shards = shards
        self._sizes = sizes
        self._seen = [(0, 0) for _ in sizes]  # tokens and bytes of each input
        self._blocks: list[dict[int, tuple[int, bool]]] = [{} for _ in sizes]
        self._prefix = 0  # tokens of the unbroken row of blocks from the first on
        self._next = (0, 0)

    def add(self, number: int, block: int, header: PartHeader) -> None:
        tokens = header.tokens["train"]
        self.tokens += tokens
        self.bytes += header.weight
        self._blocks[number][block] = tokens, header.is_last
        self._seen[number] = self._seen[number][0] + tokens, self._seen[number][1] + header.weight
        number, block = self._next
        while number < len(self._blocks) and block in self._blocks[number]:
            tokens, is_last = self._blocks[number][block]
            self._prefix += tokens
            number, block = (number + 1, 0) if is_last else (number, block + 1)
        self._next = number, block

    def is_whole(self, number: int) -> bool:
        """Whether every block of an input is there."""
        blocks = self._blocks[number]
        return bool(blocks) and max(blocks) == len(blocks) - 1 and blocks[len(blocks) - 1][1]

    def is_enough(self, number: int, block: Block) -> bool:
        """Whether the set ends before this block, as far as can be told here."""
        if self.budget is None:
            return False
        if self._prefix >= self.budget:
            return True
        return self._shards > 1 and self._tokens_before(number, block) >= self.budget * _MARGIN

    def _tokens_before(self, number: int, block: Block) -> float:
        """Rather too few than too many: an input of which nothing is there counts as the thinnest of the others."""
        densities = [tokens / size if size else None for tokens, size in self._seen]
        thinnest = min((density for density in densities if density is not None), default=0.0)
        known = [thinnest if density is None else density for density in densities[: number + 1]]
        inside = getattr(block, "start", 0) if getattr(block, "data", b"") is None else 0
        return sum(map(mul, known, self._sizes[:number])) + known[number] * inside

    @property
    def share(self) -> float | None:
        """Of the whole work; None where nothing tells."""
        shares = []
        if self.total_bytes:
            shares.append(self.bytes * self._shards / self.total_bytes)
        if self.budget is not None:
            shares.append(self.tokens * self._shards / self.budget)
        return min(1.0, max(shares)) if shares else None
