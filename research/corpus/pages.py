# SPDX-License-Identifier: Apache-2.0
"""From the prose of many files to the documents of a corpus: without repeats, of a fair length, each on one side.

A document's place and its side follow from the hash of its text alone, so neither moves when others come or go.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from research.corpus.duplicates import SeenBlocks, SeenPages
from research.corpus.prose import Block
from research.corpus.readers import is_collection

SIDES = ("train", "valid", "test")
_HELD_OUT_SHARE = 0.045  # of the pages, for each of valid and test
_SHORTEST_PAGE = 300  # characters
_LONGEST_PAGE = 64_000  # a longer one is cut between paragraphs: no page is much of a validation set
_ENTRIES_TOGETHER = 8_000  # characters of a document from a dictionary, whose file would be one page


@dataclass(frozen=True)
class Page:
    """One document: where its text comes from, and the text."""

    package: str
    text: str

    @property
    def key(self) -> bytes:
        """Decides its place and its side."""
        return hashlib.sha256(self.text.encode()).digest()

    @property
    def side(self) -> str:
        place = int.from_bytes(self.key[-8:], "big") / 2**64
        return "valid" if place < _HELD_OUT_SHARE else "test" if place < 2 * _HELD_OUT_SHARE else "train"


def make_pages(files: Iterable[tuple[str, list[Block]]], counts: Counter[str]) -> Iterator[Page]:
    """Pages without repeats, from the blocks of each file.

    Args:
        files: name, which begins with the package's, and blocks.
        counts: updated with the numbers of blocks, and of blocks and pages left out, with the reasons.
    """
    seen_blocks, seen_pages = SeenBlocks(), SeenPages()
    for name, blocks in files:
        fresh = [block for block in blocks if seen_blocks.is_new(block.text)]
        counts["blocks"] += len(blocks)
        counts["repeated blocks"] += len(blocks) - len(fresh)
        longest = _ENTRIES_TOGETHER if is_collection(name) else _LONGEST_PAGE
        for text in _cut(fresh, longest):
            if len(text) < _SHORTEST_PAGE:
                counts["short pages"] += 1
            elif not seen_pages.is_new(text):
                counts["pages nearly like another"] += 1
            else:
                yield Page(name.partition("/")[0], text)


def _cut(blocks: Iterable[Block], longest: int) -> Iterator[str]:
    lines: list[str] = []
    characters = 0
    for block in blocks:
        if characters > 0 and characters + len(block.text) > longest:
            yield "\n".join(lines)
            lines, characters = [], 0
        lines += [block.heading, block.text] if block.heading else [block.text]
        characters += len(block.text)
    if lines:
        yield "\n".join(lines)
