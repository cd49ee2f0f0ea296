# SPDX-License-Identifier: Apache-2.0
"""A sample of the sources to train a tokenizer on: the same every time, drawn evenly from their length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from simreg_megatron.data.indexed import DataError
from simreg_megatron.data.sources import Input

_PLACES = 64
_CHARACTERS = 6_000_000  # twice what the tokenizer's own draw takes
_BLOCK = 1 << 20


def sample_texts(inputs: Sequence[Input], key: str) -> Iterator[str]:
    """Documents from up to 64 places: the beginnings of inputs, and of even parts of long ones.

    Raises:
        DataError: there is no text.
    """
    chosen = inputs if len(inputs) <= _PLACES else [inputs[i * len(inputs) // _PLACES] for i in range(_PLACES)]
    places = max(1, _PLACES // len(chosen))
    some = False
    for one in chosen:
        # To enter a shared input is free, and how many blocks it has only its blocks tell: row groups and files of text
        # are longer or shorter than asked for.
        blocks = sum(1 for _ in one.blocks(_BLOCK, lambda _: True)) if one.shared else 1
        numbers = sorted({i * blocks // places for i in range(places)})
        for text in _texts(one, numbers, key, _CHARACTERS // len(chosen)):
            some = True
            yield text
    if not some:
        raise DataError(f"the sources hold no text under the key {key!r} to train a tokenizer on")


def _texts(one: Input, numbers: Sequence[int], key: str, characters: int) -> Iterator[str]:
    left = set(numbers)
    for block in one.blocks(_BLOCK, left.__contains__):
        left.discard(block.number)
        quota = characters // len(numbers)
        for record in block.records(key):
            if record.text:
                yield record.text
                quota -= len(record.text)
            if quota <= 0:
                break
        if not left:
            return
