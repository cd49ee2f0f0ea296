# SPDX-License-Identifier: Apache-2.0
"""New inputs from old ones, by a random generator of one's own: the same seed makes the same inputs anywhere."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

_NUMBERS = (0, 1, 7, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**62, 2**63 - 1, 2**64 - 1)
_DECIMALS = (b"-1", b"0", b"1e999", b"nan", b"0.5", b"99999999999999999999", b"9" * 5000, b"1000000000", b"null", b"[]")
_DIGITS = re.compile(rb"\d+")


def mutated(data: bytes, pool: Sequence[bytes], words: Sequence[bytes], draw: random.Random, longest: int) -> bytes:
    """`data` with one to four changes, at most `longest` bytes."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4))):
        draw.choice(_CHANGES)(changed, pool, words, draw)
    return bytes(changed[:longest])


def _place(data: bytearray, draw: random.Random) -> int:
    return draw.randrange(len(data) + 1)


def _span(data: bytes | bytearray, draw: random.Random) -> slice:
    start = draw.randrange(len(data) + 1)
    return slice(start, start + draw.choice((1, 2, 4, 16, 64, 256)))


def _flip(data: bytearray, pool: Sequence[bytes], words: Sequence[bytes], draw: random.Random) -> None:
    if data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def _overwrite(data: bytearray, pool: Sequence[bytes], words: Sequence[bytes], draw: random.Random) -> None:
    width = draw.choice((1, 2, 4, 8))
    number = (draw.choice(_NUMBERS) & (1 << 8 * width) - 1).to_bytes(width, "little")
    start = _place(data, draw)
    data[start : start + width] = number


def _cut(data: bytearray, pool: Sequence[bytes], words: Sequence[bytes], draw: random.Random) -> None:
    del data[_span(data, draw)]


def _repeat(data: bytearray, pool: Sequence[bytes], words: Sequence[bytes], draw: random.Random) -> None:
    piece = data[_span(data, draw)]
    start = _place(data, draw)
    data[start:start] = piece * draw.choice((1, 1, 2, 100))


def _move(data: bytearray, pool: Sequence[bytes], words: Sequence[bytes], draw: random.Random) -> None:
    span = _span(data, draw)
    piece = data[span]
    del data[span]
    start = _place(data, draw)
    data[start:start] = piece


def _word(data: bytearray, pool: Sequence[bytes], words: Sequence[bytes], draw: random.Random) -> None:
    if words:
        word, start = draw.choice(words), _place(data, draw)
        data[start : start + draw.choice((0, 0, len(word)))] = word


def _decimal(data: bytearray, pool: Sequence[bytes], words: Sequence[bytes], draw: random.Random) -> None:
    """A number that is written out, for one that is nobody's idea."""
    if found := list(_DIGITS.finditer(data)):
        data[slice(*draw.choice(found).span())] = draw.choice(_DECIMALS)


def _splice(data: bytearray, pool: Sequence[bytes], words: Sequence[bytes], draw: random.Random) -> None:
    other = draw.choice(pool)
    start = _place(data, draw)
    data[start:] = other[draw.randrange(len(other) + 1) :]


_CHANGES = (_flip, _overwrite, _cut, _repeat, _move, _word, _decimal, _splice)
