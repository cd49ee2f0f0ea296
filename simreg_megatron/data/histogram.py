# SPDX-License-Identifier: Apache-2.0
"""How often each token is a label: counted from the mapped .bin, in memory O(vocabulary).

Every token of a set but the first is the label of the one before it, so the counts of tokens are those of labels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simreg_megatron.data.assemble import MANIFEST
from simreg_megatron.data.check import manifest_of, vocabulary_of
from simreg_megatron.data.encoding import MOST_IDS
from simreg_megatron.data.indexed import DataError
from simreg_megatron.data.tokens import open_tokens

if TYPE_CHECKING:
    import numpy as np

_CHUNK = 1 << 22


@dataclass(frozen=True)
class LabelCounts:
    """counts[id] of a set."""

    prefix: Path
    counts: np.ndarray

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    def top(self, share: float) -> tuple[int, float]:
        """How many ids the most frequent `share` of the vocabulary are, and what part of all labels they hold."""
        import numpy as np

        count = max(1, math.ceil(share * len(self.counts) - 1e-9))
        return count, float(np.sort(self.counts)[::-1][:count].sum() / self.total)

    def sentence(self, share: float) -> str:
        count, held = self.top(share)
        return (
            f"{self.total:,} labels; the {count:,} most frequent of {len(self.counts):,} token ids ({share:.2%}) hold "
            f"{held:.2%} of them; {int((self.counts > 0).sum()):,} ids occur"
        )

    def as_dict(self, share: float) -> dict[str, Any]:
        count, held = self.top(share)
        return {
            "prefix": str(self.prefix),
            "labels": self.total,
            "vocab_size": len(self.counts),
            "ids_that_occur": int((self.counts > 0).sum()),
            "top": {"share_of_vocabulary": share, "ids": count, "share_of_labels": held},
            "counts": self.counts.tolist(),
        }


def count_labels(prefix: Path, *, vocab_size: int | None = None) -> LabelCounts:
    """Count the tokens of `prefix`.bin.

    Args:
        prefix: path of the pair without .bin and .idx.
        vocab_size: number of counts; the manifest's by default, or else the largest id and one.

    Raises:
        DataError: the pair is not whole, or holds ids beyond the vocabulary.
    """
    import numpy as np

    if vocab_size is not None and not 1 <= vocab_size <= MOST_IDS:
        raise DataError(f"--vocab-size takes a number of token ids, from 1 to {MOST_IDS}, not {vocab_size}")
    tokens = open_tokens(prefix)
    size = vocab_size or vocabulary_of(manifest_of(Path(f"{prefix}.bin")) or {}, prefix.parent / MANIFEST)
    counts = np.zeros(size, dtype=np.int64)
    for start in range(0, len(tokens), _CHUNK):
        part = tokens[start : start + _CHUNK]
        if part.min() < 0 or part.max() > MOST_IDS:
            raise DataError(f"{prefix}.bin holds numbers that are no token ids, {part.min()} to {part.max()}")
        found = np.bincount(part, minlength=size)
        if size and len(found) > size:
            raise DataError(f"{prefix}.bin holds the id {len(found) - 1}, beyond the vocabulary of {size}")
        if len(found) > len(counts):
            counts = np.concatenate([counts, np.zeros(len(found) - len(counts), dtype=np.int64)])
        counts[: len(found)] += found
    return LabelCounts(prefix, counts)
