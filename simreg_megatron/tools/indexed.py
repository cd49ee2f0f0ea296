# SPDX-License-Identifier: Apache-2.0
"""Megatron's .bin/.idx pairs: write one, and read what its index holds.

PREFIX.bin holds all token ids. PREFIX.idx holds, after a header, the length (int32) and the byte offset (int64) of
every sequence, and the number of sequences before the end of every document (int64). A document is one sequence here;
an empty one has none. The bytes are those of Megatron's IndexedDatasetBuilder, whose import takes seconds and a GPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from simreg_megatron.notices import SentenceError

if TYPE_CHECKING:
    import numpy as np

ENDINGS = (".bin", ".idx")
MANIFEST = "manifest.json"
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, type code, sequences, ends of documents (with a leading 0)
_TYPES = {1: ("uint8", 1), 2: ("int8", 1), 3: ("int16", 2), 4: ("int32", 4), 5: ("int64", 8), 8: ("uint16", 2)}


class DataError(SentenceError):
    """A text, tokenizer or data set that cannot be used; the message says why and how to fix it."""


def token_dtype(vocab_size: int) -> str:
    """Return the type of token ids by Megatron's rule: uint16 for vocabularies below 65,500, else int32."""
    return "uint16" if vocab_size < 65500 else "int32"


class PairWriter:
    """Write PREFIX.bin and PREFIX.idx, document by document; the number of token ids decides their type."""

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        self._prefix, self._dtype = prefix, token_dtype(vocab_size)
        self._bin = Path(f"{prefix}.bin").open("wb")  # noqa: SIM115
        self._lengths = array("i")
        self.documents = self.tokens = 0

    def add(self, ids: Iterable[int]) -> None:
        """Append a document, its end-of-text token included."""
        import numpy as np

        found = np.asarray(ids, dtype=self._dtype)
        self._bin.write(found.tobytes())
        self._lengths.append(len(found))
        self.documents += 1
        self.tokens += len(found)

    def close(self) -> None:
        """Finish the .bin and write the .idx."""
        import numpy as np

        self._bin.close()
        lengths = np.array(self._lengths, np.int32)
        sequences = lengths[lengths > 0]
        code, item_bytes = next((code, size) for code, (name, size) in _TYPES.items() if name == self._dtype)
        offsets, ends = np.cumsum(sequences, dtype=np.int64) - sequences, np.cumsum(lengths > 0, dtype=np.int64)
        header = _HEADER.pack(_MAGIC, 1, code, len(sequences), len(lengths) + 1)
        parts = (header, sequences.tobytes(), (offsets * item_bytes).tobytes(), bytes(8), ends.tobytes())
        Path(f"{self._prefix}.idx").write_bytes(b"".join(parts))


class Index(NamedTuple):
    """Contents of PREFIX.idx: the ids' numpy type, and the numbers of sequences, documents and tokens."""

    dtype: str
    sequences: int
    documents: int
    tokens: int


def read_index(prefix: str | os.PathLike[str]) -> Index:
    """Read the index of a pair without numpy; a DataError if a file is missing or cut, or they are of two pairs."""
    if not is_pair(prefix):
        raise DataError(explain_missing(prefix))
    data, path = (Path(f"{os.fspath(prefix)}{ending}") for ending in ENDINGS)
    with path.open("rb") as stream:
        head = stream.read(_HEADER.size).ljust(_HEADER.size, b"\0")
        magic, version, code, sequences, documents = _HEADER.unpack(head)
        size = _HEADER.size + 12 * sequences + 8 * documents
        if magic != _MAGIC or version != 1 or code not in _TYPES or path.stat().st_size < size or not sequences:
            raise DataError(f"{path} is not a whole Megatron index of token ids: prepare the data again")
        stream.seek(_HEADER.size + 4 * (sequences - 1))
        last = stream.read(4)  # the length of the last sequence, and its offset
        stream.seek(_HEADER.size + 12 * sequences - 8)
        length, offset = struct.unpack("<iq", last + stream.read(8))
    dtype, item_bytes = _TYPES[code]
    expected = offset + length * item_bytes
    if data.stat().st_size != expected:
        raise DataError(f"{data} has {data.stat().st_size} bytes and its .idx says {expected}: copy both again")
    return Index(dtype, sequences, documents - 1, expected // item_bytes)


def read_tokens(prefix: str | os.PathLike[str]) -> np.memmap:
    """Map all token ids of a pair [tokens], without reading them; a DataError as of `read_index`."""
    import numpy as np

    return np.memmap(f"{os.fspath(prefix)}.bin", dtype=read_index(prefix).dtype, mode="r")


def explain_missing(prefix: str | os.PathLike[str]) -> str:
    """Say that `prefix` names no pair."""
    return f"there is no {prefix}.bin with {prefix}.idx: give the path of both without the ending, or prepare the data"


def is_pair(prefix: str | os.PathLike[str]) -> bool:
    return all(Path(f"{os.fspath(prefix)}{ending}").is_file() for ending in ENDINGS)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()  # hashlib.file_digest came with Python 3.11
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the size and hash of each file, for the manifest."""
    return {name: {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)} for name in names}


def find_changed(folder: Path, manifest: dict[str, Any]) -> Path | None:
    """Return the first file of a set that is missing or of another size than its manifest says."""
    sizes = {folder / name: facts["bytes"] for name, facts in manifest["files"].items()}
    return next((path for path, size in sizes.items() if not path.is_file() or path.stat().st_size != size), None)


def publish(work: Path, out: Path, manifest: dict[str, Any]) -> None:
    """Move the files of a set that is whole from the folder `work` to `out`, the manifest last, and remove `work`."""
    (work / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    for name in (*manifest["files"], MANIFEST):
        (work / name).replace(out / name)
    shutil.rmtree(work)
