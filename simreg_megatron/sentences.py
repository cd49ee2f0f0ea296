# SPDX-License-Identifier: Apache-2.0
"""Errors that stay one printable sentence, even with text from a file in them."""

from __future__ import annotations

_LONGEST, _TAIL = 1000, 300


class SentenceError(ValueError):
    """The base of each package's own error: its message is one line, printable, and never longer than a screen."""

    def __init__(self, sentence: object = "") -> None:
        super().__init__(one_line(sentence))


def one_line(text: object) -> str:
    """`text` with ? for what ends a line, moves a cursor or cannot be encoded; the middle of a long one is left out."""
    line = "".join(letter if letter.isprintable() else "?" for letter in str(text))
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - _TAIL]} ... {line[-_TAIL:]}"
