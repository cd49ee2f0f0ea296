# SPDX-License-Identifier: Apache-2.0
"""What a worker does with a block: read, tokenize, close each document, choose its side, write the part."""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import os
import signal
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from simreg_megatron.data.blocks import Block
from simreg_megatron.data.encoding import Encoder, TokenizerFacts
from simreg_megatron.data.indexed import DataError
from simreg_megatron.data.parts import SIDES, PartHeader, write_part

BOS_POLICIES = ("none", "document")
ERROR_POLICIES = ("stop", "skip")
_BATCH_CHARACTERS = 1 << 20
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Recipe:
    """How a document becomes tokens, the same in every worker."""

    tokenizer: TokenizerFacts
    key: str
    bos: str
    valid_share: float
    on_error: str


_worker: tuple[Recipe, Encoder] | None = None  # of this process: loading a tokenizer takes seconds


def start_worker(recipe: Recipe) -> None:
    """Prepare a process of the pool; it dies with its parent, so that none goes on writing after a kill -9."""
    global _worker
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # it died while this process was starting
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to answer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process, one core
    _worker = recipe, Encoder(recipe.tokenizer)


def work(block: Block, path: Path, made_with: str) -> PartHeader:
    """Make the part of a block, and note in it what it was made with.

    Raises:
        DataError: a record is broken and the recipe says stop.
    """
    assert _worker is not None
    recipe, encoder = _worker
    part = _Part(recipe, PartHeader(block.is_last, block.weight, made_with=made_with))
    for texts in _batches(_good_texts(block, recipe, part.header)):
        for text, ids in zip(texts, encoder.encode(texts), strict=True):
            part.add(text, ids)
    write_part(path, part.header, part.arrays())
    return part.header


class _Part:
    """The tokens of a block as they come."""

    def __init__(self, recipe: Recipe, header: PartHeader) -> None:
        self.header = header
        self._recipe = recipe
        self._tokens = {side: array("H" if recipe.tokenizer.dtype == "uint16" else "i") for side in SIDES}
        self._lengths = {side: array("i") for side in SIDES}

    def add(self, text: str, ids: list[int]) -> None:
        side = "valid" if _is_validation(text, self._recipe.valid_share) else "train"
        before, tokens = len(self._tokens[side]), self._tokens[side]
        if self._recipe.bos == "document":
            tokens.append(self._recipe.tokenizer.bos_id or 0)
        tokens.extend(ids)
        if len(tokens) > before:
            tokens.append(self._recipe.tokenizer.eos_id)
        else:  # no tokens: no sequence either, though it keeps its place among the documents
            self.header.empty += 1
        self._lengths[side].append(len(tokens) - before)
        self.header.documents[side] += 1
        self.header.tokens[side] += len(tokens) - before
        self.header.characters += len(text)

    def arrays(self):  # type: ignore[no-untyped-def]
        import numpy as np

        return {
            f"{side}_{name}": np.frombuffer(values[side], dtype=values[side].typecode)
            if values[side]
            else np.zeros(0, dtype=values[side].typecode)
            for name, values in (("lengths", self._lengths), ("tokens", self._tokens))
            for side in SIDES
        }


def _good_texts(block: Block, recipe: Recipe, header: PartHeader) -> Iterator[str]:
    for record in block.records(recipe.key):
        text, problem = record.text, record.problem
        if not problem:
            try:
                text.encode()
            except UnicodeEncodeError:
                problem = "bytes that are not UTF-8, or half of a surrogate pair, which is no text"
        if not problem:
            yield text
        elif recipe.on_error == "skip":
            header.skip(f"{block.place(record)}: {problem}")
        else:
            raise DataError(
                f"{block.where(record.number)}: {problem}; fix it and give the same command again (finished work on "
                "other files is kept), or add --on-error skip, which leaves such records out and counts them"
            )


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Some thousand documents at a time, so that memory stays small."""
    seen = 0

    def number(text: str) -> int:
        nonlocal seen
        seen += len(text) + 1
        return seen // _BATCH_CHARACTERS

    return (list(group) for _, group in groupby(texts, key=number))


def _is_validation(text: str, share: float) -> bool:
    """Decided by the text alone: it never moves, and its duplicates go with it."""
    if not share:
        return False
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64
