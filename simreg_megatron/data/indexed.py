# SPDX-License-Identifier: Apache-2.0
"""Megatron's .bin/.idx pairs: written by Megatron's own builder, and checked before a run trusts them."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable
from pathlib import Path

MANIFEST = "manifest.json"
_HEADER = b"MMIDIDX\x00\x00"
_FIXED = struct.Struct("<9sQBQQ")  # magic, version, type code, sequences, documents
_ITEM_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}
_PREPARE = "prepare the data again, or copy it again from where it was made"


class DataError(ValueError):
    """A data set or tokenizer that no run should start with; the message says why and what to do."""


def write_dataset(prefix: Path, documents: Iterable[str], tokenizer_model: Path) -> tuple[int, int]:
    """Tokenize and write `prefix`.bin and .idx; end-of-text closes every document, nothing opens it.

    Returns:
        The number of documents and of tokens.
    """
    import numpy as np
    import sentencepiece
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer_model))
    dtype = DType.optimal_dtype(tokenizer.vocab_size())
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    num_documents = num_tokens = 0
    for tokens in tokenizer.encode(list(documents), num_threads=2):
        tokens.append(tokenizer.eos_id())
        builder.add_document(torch.from_numpy(np.asarray(tokens, dtype=np.int64)), [len(tokens)])
        num_documents += 1
        num_tokens += len(tokens)
    builder.finalize(f"{prefix}.idx")
    return num_documents, num_tokens


def check_dataset(prefix: str | os.PathLike[str], *, tokenizer: str | os.PathLike[str] | None = None) -> None:
    """See that a data set is whole, and made with this tokenizer where its manifest tells.

    Args:
        prefix: path of the pair without .bin and .idx.
        tokenizer: a sentencepiece model file; a Hugging Face folder or name is not compared.

    Raises:
        DataError: one sentence with the cause and the mend.
    """
    index, data = Path(f"{os.fspath(prefix)}.idx"), Path(f"{os.fspath(prefix)}.bin")
    for path in (data, index):
        if not path.is_file():
            raise DataError(f"there is no {path}: give the prefix of a .bin/.idx pair, without the ending")
        if path.stat().st_size == 0:
            raise DataError(f"{path} is empty: {_PREPARE}")
    expected = _expected_bytes(index)
    if data.stat().st_size != expected:
        raise DataError(
            f"{data} holds {data.stat().st_size} bytes where {index.name} counts {expected}, so it was cut off "
            f"or belongs to another index: {_PREPARE}"
        )
    if tokenizer is not None and str(tokenizer).endswith(".model"):
        _check_tokenizer(Path(tokenizer), data)


def _expected_bytes(index: Path) -> int:
    """The size of the .bin that an index describes."""
    with index.open("rb") as stream:
        fixed = stream.read(_FIXED.size)
        if len(fixed) < _FIXED.size or not fixed.startswith(_HEADER):
            raise DataError(f"{index} is not a Megatron index (its first bytes are foreign): {_PREPARE}")
        _, version, code, num_sequences, num_documents = _FIXED.unpack(fixed)
        if version != 1 or code not in _ITEM_BYTES:
            raise DataError(f"{index} has an unknown version {version} or number type {code}: {_PREPARE}")
        arrays = 4 * num_sequences + 8 * num_sequences + 8 * num_documents
        if index.stat().st_size < _FIXED.size + arrays:
            raise DataError(f"{index} is shorter than the {num_sequences} sequences it announces: {_PREPARE}")
        if num_sequences == 0:
            raise DataError(f"{index} holds no text: {_PREPARE}")
        stream.seek(_FIXED.size + 4 * (num_sequences - 1))
        (last_length,) = struct.unpack("<i", stream.read(4))
        stream.seek(_FIXED.size + 4 * num_sequences + 8 * (num_sequences - 1))
        (last_pointer,) = struct.unpack("<q", stream.read(8))
    return last_pointer + last_length * _ITEM_BYTES[code]


def _check_tokenizer(tokenizer: Path, data: Path) -> None:
    if not tokenizer.is_file() or tokenizer.stat().st_size == 0:
        state = "is empty" if tokenizer.is_file() else "does not exist"
        raise DataError(f"the tokenizer {tokenizer} {state}: give the model file that the data was made with")
    import sentencepiece

    try:
        sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    except (RuntimeError, OSError):
        raise DataError(f"{tokenizer} is not a sentencepiece model: give the one the data was made with") from None
    manifest = data.parent / MANIFEST
    if manifest.is_file():
        made_with = json.loads(manifest.read_text()).get("tokenizer_sha256")
        if made_with is not None and made_with != sha256(tokenizer):
            raise DataError(
                f"{data.name} was made with another tokenizer than {tokenizer} ({MANIFEST} beside it tells): "
                "give the tokenizer the data was made with, or make the data again"
            )


def sha256(path: Path) -> str:
    """Hash of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()  # hashlib.file_digest came with Python 3.11
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
