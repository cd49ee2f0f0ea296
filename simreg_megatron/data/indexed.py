# SPDX-License-Identifier: Apache-2.0
"""Megatron's .bin/.idx pairs: written byte for byte as its own builder writes them, in memory O(documents).

A .bin holds all token ids one after the other, uint16 or int32. Its .idx holds, after a header, the length (int32) and
the byte offset (int64) of every sequence, and for every document the number of sequences before its end (int64). Here a
document is one sequence; one without tokens is none, and still has its end, as in Megatron's own preprocessing.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from simreg_megatron.sentences import SentenceError

if TYPE_CHECKING:
    import numpy as np

HEADER = b"MMIDIDX\x00\x00"
FIXED = struct.Struct("<9sQBQQ")  # magic, version, type code, sequences, documents (their ends, and a leading 0)
ITEM_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}
_CODES = {"int32": 4, "uint16": 8}
_UINT16_BELOW = 65500  # Megatron's own limit
_BLOCK = 1 << 20
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class DataError(SentenceError):
    """A data set or tokenizer that no run should start with; the message says why and what to do."""


def explain(error: OSError, folder: Path) -> str:
    """The sentence for a file system that refuses."""
    if error.errno in _NO_SPACE:
        return (
            f"no more can be written to {folder} ({error.strerror}): all complete parts are kept, so free some space "
            "(about 4 bytes for each token of uint16, 8 of int32) and give the same command again"
        )
    place = f" ({error.filename})" if error.filename else ""
    return f"{error.strerror or error}{place}: fix that and give the same command again; all complete parts are kept"


def token_dtype(vocab_size: int) -> str:
    """uint16 where the vocabulary allows it, else int32: by Megatron's rule."""
    return "uint16" if vocab_size < _UINT16_BELOW else "int32"


@dataclass(frozen=True)
class Digest:
    """Size and hash of a file."""

    bytes: int
    sha256: str


class PairWriter:
    """Writes `prefix`.bin and .idx: under other names until `commit`, which gives them theirs.

    Args:
        prefix: path of the pair without .bin and .idx.
        dtype: "uint16" or "int32".
    """

    def __init__(self, prefix: Path, dtype: str) -> None:
        self._prefix, self._dtype = prefix, dtype
        mark = secrets.token_hex(8)  # two programs that write one pair never write one file
        self._paths = {ending: Path(f"{prefix}{ending}.writing-{mark}") for ending in (".bin", ".idx")}
        self._bin = self._paths[".bin"].open("wb")
        self._sha256 = hashlib.sha256()
        self._lengths: list[np.ndarray] = []
        self.num_documents = self.num_tokens = 0

    def append(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Documents one after the other: their tokens [sum of lengths], and the length of each."""
        import numpy as np

        data = np.ascontiguousarray(tokens, dtype=self._dtype).data
        self._bin.write(data)
        self._sha256.update(data)
        self._lengths.append(np.asarray(lengths, dtype=np.int32))
        self.num_documents += len(lengths)
        self.num_tokens += len(tokens)

    def commit(self) -> dict[str, Digest]:
        """Finish both files, on the disk and under their names; size and hash of each."""
        _close_safely(self._bin)
        self._write_index()
        digests = {}
        for ending, path in self._paths.items():
            digest = self._sha256.hexdigest() if ending == ".bin" else sha256(path)
            digests[ending] = Digest(path.stat().st_size, digest)
            path.replace(f"{self._prefix}{ending}")
        return digests

    def abandon(self) -> None:
        """Remove what has not got its name."""
        with contextlib.suppress(OSError):  # of what could not be written any more
            self._bin.close()
        for path in self._paths.values():
            path.unlink(missing_ok=True)

    def _write_index(self) -> None:
        import numpy as np

        lengths = np.concatenate([np.zeros(0, np.int32), *self._lengths])
        sequences = lengths[lengths > 0]
        with self._paths[".idx"].open("wb") as stream:
            stream.write(FIXED.pack(HEADER, 1, _CODES[self._dtype], len(sequences), len(lengths) + 1))
            stream.write(sequences.data)
            _write_offsets(stream, sequences, ITEM_BYTES[_CODES[self._dtype]], inclusive=False)
            stream.write(bytes(8))
            _write_offsets(stream, lengths > 0, 1, inclusive=True)
            _close_safely(stream)


def _write_offsets(stream: BinaryIO, counts: np.ndarray, unit: int, *, inclusive: bool) -> None:
    """Running sums of the counts times the unit, before or after each, block by block."""
    import numpy as np

    total = 0
    for start in range(0, len(counts), _BLOCK):
        block = counts[start : start + _BLOCK].astype(np.int64) * unit
        sums = np.cumsum(block) + total
        stream.write((sums if inclusive else sums - block).data)
        total = int(sums[-1])


def _close_safely(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())
    stream.close()


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A stream to write; the file is the old one or the new one, whenever the machine stops."""
    unfinished = path.with_name(f"{path.name}.writing-{secrets.token_hex(8)}")  # numbers of processes repeat on nodes
    try:
        with unfinished.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Put the names in a folder on the disk: a rename is safe only then."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def sha256(path: Path) -> str:
    """Hash of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()  # hashlib.file_digest came with Python 3.11
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
