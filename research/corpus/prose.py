# SPDX-License-Identifier: Apache-2.0
"""Selection of running English text from a page.

A reader takes the markup off a file and gives its pieces: headings, and paragraphs of any kind. What is kept is decided
by a piece's words alone: listings, tables of an interface, menus and other languages hold too few of the short words
that English sentences are made of.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

SHORTEST = 40  # characters of a paragraph
_LONGEST_HEADING = 120
_FUNCTION_WORDS = """
a about after all also an and any are as at be because been before being but by can do does each for from had has have
he her his how i if in into is it its may more most must no not of on one only or other our out over she should so some
such than that the their them then there these they this those to under up use used was we were what when where which
while who will with would you your
"""
_COMMON = frozenset(_FUNCTION_WORDS.split())
_WORD = re.compile(r"[a-z]+(?:['-][a-z]+)*")
_SENTENCE_END = re.compile(r"[.:;!?][\"')\]]*$")
_TYPOGRAPHY = str.maketrans(
    {
        "\u00a0": " ", "\u00ad": "", "\u00b6": "", "\u2010": "-", "\u2011": "-", "\u2012": "-", "\u2013": "-",
        "\u2014": " - ", "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2026": "...", "\u200b": "",
        "\ufeff": "", "\ufffd": "",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """One piece of a page: the text between two breaks, with any white space."""

    text: str
    is_heading: bool = False


class Block(NamedTuple):
    """A paragraph on one line, and the heading above it if it is the first one there."""

    text: str
    heading: str = ""


def keep_prose(pieces: Iterable[Piece], *, entries: bool = False) -> Iterator[Block]:
    """Keep the paragraphs of English, and those headings that have one below them.

    Args:
        entries: of a dictionary, whose definitions are rarely whole sentences.
    """
    heading = ""
    for piece in pieces:
        text = piece.text if piece.text.isascii() else piece.text.translate(_TYPOGRAPHY)
        text = " ".join(text.split())
        if not text.isprintable():
            continue
        if piece.is_heading:
            heading = text if 2 < len(text) <= _LONGEST_HEADING else ""
        elif is_entry(text) if entries else is_english(text):
            yield Block(text, heading)
            heading = ""


def is_english(text: str) -> bool:
    """Return whether a paragraph is a sentence or more of English."""
    return _has_words(text, letters=0.65, common=0.2) and bool(_SENTENCE_END.search(text))


def is_entry(text: str) -> bool:
    """Return whether a paragraph explains something in English, if not in sentences."""
    return _has_words(text, letters=0.6, common=0.12)


def _has_words(text: str, *, letters: float, common: float) -> bool:
    if len(text) < SHORTEST:
        return False
    words = _WORD.findall(text.lower())
    if sum(map(len, words)) < letters * len(text):
        return False
    return sum(map(_COMMON.__contains__, words)) >= common * len(words)
