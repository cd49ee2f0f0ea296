# SPDX-License-Identifier: Apache-2.0
"""Checks of a data set before a run trusts it: its files are whole, and it suits the tokenizer and the model."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simreg_megatron.data.assemble import MANIFEST
from simreg_megatron.data.encoding import MOST_IDS, describe_tokenizer
from simreg_megatron.data.indexed import FIXED, HEADER, ITEM_BYTES, DataError
from simreg_megatron.data.pairs import explain_missing, is_pair
from simreg_megatron.data.settings import read_json, section

_PREPARE = "prepare the data again, or copy it again from where it was made"


def check_dataset(
    prefix: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    vocab_size: int | None = None,
    seq_length: int | None = None,
) -> list[str]:
    """Check that a data set is complete, and that its manifest fits the tokenizer and sizes of a run.

    Args:
        prefix: path of the pair without .bin and .idx.
        tokenizer: a sentencepiece model file, or a Hugging Face folder or name.
        vocab_size: rows of the run's embedding, where it is given and does not follow from the tokenizer.
        seq_length: tokens of one training sample.

    Returns:
        Notices for the user that need no action.

    Raises:
        DataError: one sentence with the cause and the fix.
    """
    if not is_pair(prefix):
        raise DataError(explain_missing(prefix))
    index, data = Path(f"{os.fspath(prefix)}.idx"), Path(f"{os.fspath(prefix)}.bin")
    for path in (data, index):
        if path.stat().st_size == 0:
            raise DataError(f"{path} is empty: {_PREPARE}")
    expected, item_bytes = _expected_bytes(index)
    if data.stat().st_size != expected:
        raise DataError(
            f"{data} holds {data.stat().st_size} bytes where {index.name} counts {expected}, so it was cut off "
            f"or belongs to another index: {_PREPARE}"
        )
    num_tokens = expected // item_bytes
    if seq_length is not None and num_tokens <= seq_length:
        raise DataError(
            f"{data} holds {num_tokens} tokens and one sample needs {seq_length + 1}: give more text, or a shorter "
            "--seq-length"
        )
    manifest = manifest_of(data)
    if manifest is None:
        if tokenizer is not None and (str(tokenizer).endswith(".model") or Path(tokenizer).is_file()):
            describe_tokenizer(str(tokenizer))  # see that it can be read; a folder takes seconds
        return [f"{data.parent} has no {MANIFEST}: nothing shows whether this tokenizer made {data.name}"]
    _check_manifest(manifest, data, tokenizer, vocab_size)
    return []


def check_split(prefix: str | os.PathLike[str], split: str) -> None:
    """Check that a split by documents leaves none of its sides empty, as Megatron's data sets would then hang.

    Args:
        split: weights of training, validation and test text, such as 99,1,0.

    Raises:
        DataError: these are no weights, or a side is to have a part and gets none.
    """
    with Path(f"{os.fspath(prefix)}.idx").open("rb") as stream:
        documents = FIXED.unpack(stream.read(FIXED.size))[3]
    weights = _weights(split)
    ends = [round(sum(weights[: side + 1]) / sum(weights) * documents) for side in range(len(weights))]
    for side, weight, begin, end in zip(("train", "validate", "test"), weights, [0, *ends], ends, strict=False):
        if begin == end and (weight > 0 or side == "train"):
            raise DataError(
                f"{prefix} holds {documents} documents, and --split {split} leaves none of them to {side}: give "
                "--valid-data PREFIX, text of its own, or --split 100,0,0 --eval-iters 0 to do without"
            )


def _weights(split: str) -> list[float]:
    try:
        weights = [float(word) for word in re.findall(r"[.0-9]+", split)]  # as Megatron reads it: 98/2/0 as well
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= 3 or not 0 < sum(weights) < float("inf"):
        raise DataError(
            f"--split takes up to three weights, of training, validation and test text, such as 99,1,0, not {split!r}"
        )
    return weights


def _expected_bytes(index: Path) -> tuple[int, int]:
    """The size of the .bin that an index describes, and of one token in it."""
    with index.open("rb") as stream:
        fixed = stream.read(FIXED.size)
        if len(fixed) < FIXED.size or not fixed.startswith(HEADER):
            raise DataError(f"{index} is not a Megatron index (its first bytes are wrong): {_PREPARE}")
        _, version, code, num_sequences, num_documents = FIXED.unpack(fixed)
        if version != 1 or code not in ITEM_BYTES:
            raise DataError(f"{index} has an unknown version {version} or number type {code}: {_PREPARE}")
        arrays = 4 * num_sequences + 8 * num_sequences + 8 * num_documents
        if index.stat().st_size < FIXED.size + arrays:
            raise DataError(f"{index} is shorter than the {num_sequences} sequences it announces: {_PREPARE}")
        if num_sequences == 0:
            raise DataError(f"{index} holds no text: {_PREPARE}")
        stream.seek(FIXED.size + 4 * (num_sequences - 1))
        (last_length,) = struct.unpack("<i", stream.read(4))
        stream.seek(FIXED.size + 4 * num_sequences + 8 * (num_sequences - 1))
        (last_pointer,) = struct.unpack("<q", stream.read(8))
    if last_pointer < 0 or last_length < 0 or last_pointer % ITEM_BYTES[code]:
        raise DataError(f"{index} places its last sequence where none can be: {_PREPARE}")
    return last_pointer + last_length * ITEM_BYTES[code], ITEM_BYTES[code]


def manifest_of(data: Path) -> dict[str, Any] | None:
    """The manifest beside a .bin, if it speaks of that file."""
    path = data.parent / MANIFEST
    manifest = read_json(path)
    if manifest is None or data.name not in (files := section(manifest, "files", path)):
        return None
    promised = section(files, data.name, path).get("bytes")
    if promised != data.stat().st_size:
        raise DataError(
            f"{data} holds {data.stat().st_size} bytes where {MANIFEST} tells of {promised}: it is another file "
            f"than the one that was made there, {_PREPARE}"
        )
    return manifest


def vocabulary_of(manifest: Mapping[str, Any], path: Path) -> int:
    """The number of token ids that a manifest tells; 0 where it does not.

    Raises:
        DataError: it is no such number.
    """
    size = manifest.get("vocab_size") or 0
    if not isinstance(size, int) or not 0 <= size <= MOST_IDS:
        raise DataError(f"{path} gives vocab_size as {size!r}, where a number of token ids is needed: {_PREPARE}")
    return size


def _check_manifest(
    manifest: Mapping[str, Any], data: Path, tokenizer: str | os.PathLike[str] | None, vocab_size: int | None
) -> None:
    made_with = manifest.get("tokenizer_sha256")
    if tokenizer is not None and made_with is not None and describe_tokenizer(str(tokenizer)).sha256 != made_with:
        name = manifest.get("tokenizer_name")
        raise DataError(
            f"{data.name} was made with another tokenizer{f' ({name})' if name else ''} than {tokenizer} ({MANIFEST} "
            "beside it tells): give the tokenizer the data was made with, or make the data again"
        )
    made_for = vocabulary_of(manifest, data.parent / MANIFEST)
    if vocab_size is not None and made_for > vocab_size:
        raise DataError(
            f"{data.name} was made with {made_for} token ids and --vocab-size {vocab_size} has room for "
            "fewer: leave --vocab-size out, or make the data with the tokenizer of this model"
        )
