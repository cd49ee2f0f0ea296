# SPDX-License-Identifier: Apache-2.0
"""From a file of documentation to its prose: which reader takes which file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from research.corpus.html import read_html
from research.corpus.manual import read_manual
from research.corpus.plain import read_dictionary, read_pod, read_text, read_wordnet
from research.corpus.prose import Block, Piece, keep_prose

_Reader = Callable[[str], Iterable[Piece]]
_READERS: tuple[tuple[re.Pattern[str], _Reader], ...] = (
    (re.compile(r"\.html?$"), read_html),
    (re.compile(r"/man/man"), read_manual),
    (re.compile(r"\.pod$"), read_pod),
    (re.compile(r"/wordnet/data\."), read_wordnet),
    (re.compile(r"\.dict\.dz$"), read_dictionary),
)


def read_page(name: str, data: bytes) -> list[Block]:
    """Read the prose of a file, by its name; no block if it holds none."""
    reader = _reader_of(name)
    return list(keep_prose(reader(_decode(data)), entries=reader is read_dictionary))


def is_collection(name: str) -> bool:
    """Return whether a file is no page but thousands of short entries."""
    return _reader_of(name) in (read_dictionary, read_wordnet)


def _reader_of(name: str) -> _Reader:
    base = name.removesuffix(".gz")
    return next((reader for pattern, reader in _READERS if pattern.search(base)), read_text)


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")
