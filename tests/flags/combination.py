# SPDX-License-Identifier: Apache-2.0
"""One combination of flags, and its command line. Ranks import it, so it imports little."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from tests.megatron.runs import MEGATRON_FLAGS

_SPLIT = re.compile(r" \((\d+) processes\)$")
Group = tuple[str, ...]
"""Flags of Megatron that belong together, each a word."""

BASE: Group = (
    *("--num-layers=2", "--hidden-size=16", "--num-attention-heads=2", "--ffn-hidden-size=32"),
    *("--seq-length=16", "--max-position-embeddings=16", "--micro-batch-size=2", "--global-batch-size=4"),
    *("--mock-data", "--tokenizer-type=NullTokenizer", "--vocab-size=40", "--make-vocab-size-divisible-by=8"),
    *("--split=90,10,0", "--train-iters=2", "--lr=1e-3", "--lr-decay-style=constant", "--seed=7"),
    *("--eval-iters=0", "--eval-interval=1000", "--log-interval=1", "--distributed-timeout-minutes=1"),
    *MEGATRON_FLAGS,
)
"""The tiniest model that has all that we touch; later flags win."""


@dataclass(frozen=True)
class Combination:
    """Flags of one run: ours, and groups of Megatron's, each some words that belong together."""

    ours: tuple[str, ...]
    groups: tuple[Group, ...]
    processes: int = 1

    @classmethod
    def of(cls, text: str) -> Combination:
        """The one that `str` shows."""
        split = _SPLIT.search(text)
        words = shlex.split(_SPLIT.sub("", text))
        ours = tuple(word for word in words if word.startswith(("--simreg", "--adagc")))
        rest = tuple(word for word in words if word not in ours)
        return cls(ours, (rest,), int(split[1]) if split else 1)

    @property
    def resumes(self) -> bool:
        """Return whether it is started twice: the second run goes on from the first one's checkpoint."""
        return any("--load={out}/saved" in group for group in self.groups) and "--train-samples" not in str(self)

    @property
    def overflowing(self) -> Combination | None:
        """The same with gradients too large for fp16 in any case; None where Megatron would scale them down."""
        groups = tuple(
            tuple("--loss-scale=1e30" if word.startswith("--loss-scale=") else word for word in group)
            for group in self.groups
        )
        return replace(self, groups=groups) if groups != self.groups else None

    def flags(self, out: Path, *, plain: bool = False) -> list[str]:
        """The command line; without ours where `plain`."""
        more = [word for group in self.groups for word in group]
        by_samples = any(word.startswith("--train-samples") for word in more)
        given = [word for word in BASE if not (by_samples and word.startswith("--train-iters"))] + more
        return [word.replace("{out}", str(out)) for word in given] + ([] if plain else list(self.ours))

    def __str__(self) -> str:
        """Format the flags that are not in every run, as one would type them."""
        split = (f"({self.processes} processes)",) if self.processes > 1 else ()
        return " ".join((*map(shlex.quote, self.ours), *(word for group in self.groups for word in group), *split))
