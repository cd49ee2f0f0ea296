# SPDX-License-Identifier: Apache-2.0
"""Repeated text, left out: blocks that were there before, and pages that are nearly another.

Two pages are compared by the Jaccard similarity of their sets of five words in a row, |A and B| / |A or B|, estimated
by MinHash: the share of 64 hash functions under which both sets have the same smallest value. Only pages that agree in
one of 16 bands of four values are compared at all (Broder 1997; Leskovec, Rajaraman, Ullman: Mining of Massive
Datasets, chapter 3), which finds a pair of similarity s with probability 1 - (1 - s^4)^16: 0.988 at 0.7.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections import defaultdict

import numpy as np

_WORDS_IN_A_ROW = 5
_BANDS, _ROWS = 16, 4
_SIMILAR = 0.7
_WORD = re.compile(r"[a-z]+")


class SeenBlocks:
    """Recognises repeated blocks, ignoring case, numbers and punctuation."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def is_new(self, text: str) -> bool:
        digest = hashlib.blake2b("".join(_WORD.findall(text.lower())).encode(), digest_size=12).digest()
        if digest in self._seen:
            return False
        self._seen.add(digest)
        return True


class SeenPages:
    """Recognises a page that is nearly one that was kept before."""

    def __init__(self) -> None:
        draw = np.random.Generator(np.random.PCG64(0))
        self._factors = draw.integers(1, 2**63, size=_BANDS * _ROWS, dtype=np.uint64) | np.uint64(1)
        self._offsets = draw.integers(0, 2**63, size=_BANDS * _ROWS, dtype=np.uint64)
        self._signatures: list[np.ndarray] = []
        self._buckets: defaultdict[bytes, list[int]] = defaultdict(list)

    def is_new(self, text: str) -> bool:
        signature = self._signature(text)
        keys = [bytes([band]) + signature[band * _ROWS : (band + 1) * _ROWS].tobytes() for band in range(_BANDS)]
        candidates = {number for key in keys for number in self._buckets.get(key, ())}
        if any(np.mean(self._signatures[number] == signature) >= _SIMILAR for number in candidates):
            return False
        for key in keys:
            self._buckets[key].append(len(self._signatures))
        self._signatures.append(signature)
        return True

    def _signature(self, text: str) -> np.ndarray:
        """Find the smallest value of each hash function over the page's rows of words [functions]."""
        hashes = np.array([zlib.crc32(word.encode()) for word in _WORD.findall(text.lower())], dtype=np.uint64)
        hashes = np.concatenate([hashes, np.zeros(max(0, _WORDS_IN_A_ROW - len(hashes)), np.uint64)])
        rows = np.zeros(len(hashes) - _WORDS_IN_A_ROW + 1, np.uint64)
        for shift in range(_WORDS_IN_A_ROW):
            rows = rows * np.uint64(0x9E3779B97F4A7C15) + hashes[shift : shift + len(rows)]
        rows = np.unique(rows)
        smallest = np.full(len(self._factors), np.iinfo(np.uint64).max)
        for start in range(0, len(rows), 4096):
            values = (rows[start : start + 4096, None] * self._factors + self._offsets) >> np.uint64(16)
            smallest = np.minimum(smallest, values.min(axis=0))
        return smallest
