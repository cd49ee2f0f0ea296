# SPDX-License-Identifier: Apache-2.0
"""A sample of the sources to train a tokenizer on: the same every time, drawn evenly from their length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from simreg_megatron.data.indexed import DataError
from simreg_megatron.data.sources import Input

_PLACES = 64
_CHARACTERS = 6_000_000  # twice what the tokenizer's own draw takes
_BLOCK = 1 << 20
_READ_ON = 64  # so many times its quota is read of an input that can be entered at its beginning only
_LINE = 4000  # bytes: sentencepiece leaves out lines of over 4,192 and does not say so


def sample_texts(inputs: Sequence[Input], key: str) -> Iterator[str]:
    """Documents from up to 64 places: the beginnings of inputs, and of even parts of long ones.

    Raises:
        DataError: there is no text.
    """
    chosen = inputs if len(inputs) <= _PLACES else [inputs[i * len(inputs) // _PLACES] for i in range(_PLACES)]
    some = False
    for one in chosen:
        quota = _CHARACTERS // len(chosen)
        places = max(1, _PLACES // len(chosen))
        for text in _texts(one, places, key, quota) if one.shared else _spread(one, key, quota):
            some = True
            yield "\n".join(piece for line in text.splitlines() for piece in _cut(line))
    if not some:
        raise DataError(f"the sources hold no text under the key {key!r} to train a tokenizer on")


def _texts(one: Input, places: int, key: str, characters: int) -> Iterator[str]:
    # To enter a shared input is free, and how many blocks it has only its blocks tell: row groups and files of text
    # are longer or shorter than asked for.
    blocks = sum(1 for _ in one.blocks(_BLOCK, lambda _: True))
    numbers = {i * blocks // places for i in range(places)}
    for block in one.blocks(_BLOCK, numbers.__contains__):
        quota = characters // len(numbers)
        for record in block.records(key):
            if record.text:
                yield record.text
                quota -= len(record.text)
            if quota <= 0:
                break


def _spread(one: Input, key: str, characters: int) -> list[str]:
    """Every k-th document of what is read; k doubles whenever these are too many."""
    kept: list[str] = []
    step, seen, read = 1, 0, 0
    for block in one.blocks(_BLOCK, lambda _: True):
        for text in (record.text for record in block.records(key) if record.text):
            if seen % step == 0:
                kept.append(text)
            seen += 1
            read += len(text)
        while sum(map(len, kept)) > characters and len(kept) > 1:
            kept, step = kept[::2], 2 * step
        if read >= _READ_ON * characters:
            break
    return kept


def _cut(line: str) -> Iterator[str]:
    """Pieces of a line, cut at spaces where there are some, without the halves of pairs that are no text."""
    data, start = line.encode("utf-8", "ignore"), 0
    while len(data) - start > _LINE:
        end = data.rfind(b" ", start + 1, start + _LINE)
        if end < 0:
            end = start + _LINE
            while data[end] & 0xC0 == 0x80:  # inside a character
                end -= 1
        yield data[start:end].decode()
        start = end + (data[end] == ord(" "))
    yield data[start:].decode()
