# SPDX-License-Identifier: Apache-2.0
"""The text of a plan: where it lies, the hash that every result carries, and how many bytes a token stands for."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simreg_megatron.data.builtin import ensure_builtin_corpus
from simreg_megatron.data.indexed import DataError, sha256
from simreg_megatron.data.settings import read_json, write_json
from simreg_megatron.data.tokens import open_tokens
from simreg_megatron.reproduce.errors import ReproduceError

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"builtin": ROOT / "data" / "builtin", "large": ROOT / "data" / "large"}
_FACTS = "reproduce-facts.json"  # beside the data: hashing and decoding take seconds
_BATCH = 65536  # tokens decoded at a time


@dataclass(frozen=True)
class Dataset:
    """Training and validation text of one tokenizer.

    Attributes:
        digest: of the bytes of all its files.
        bytes_per_token: of the validation text; bits per byte = loss / (ln 2 * bytes_per_token).
        validation_tokens: how many that text has.
    """

    folder: Path
    digest: str
    bytes_per_token: float
    validation_tokens: int

    @property
    def flags(self) -> dict[str, str]:
        return {
            "data": str(self.folder / "train"),
            "valid-data": str(self.folder / "valid"),
            "tokenizer": str(self.folder / "tokenizer.model"),
        }


def open_dataset(name: str) -> Dataset:
    """The data set of that name, or in that folder.

    Raises:
        ReproduceError: there is none, or it is damaged.
    """
    if name == "builtin":
        ensure_builtin_corpus(FOLDERS[name])
    folder = FOLDERS.get(name, Path(name)).resolve()
    files = [folder / file for file in ("train.bin", "train.idx", "valid.bin", "valid.idx", "tokenizer.model")]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise ReproduceError(
            f"the data set {name} is not there ({missing[0]} is missing): make it with `simreg-megatron data "
            "corpus-large --out data/large`, or name another folder with --data"
        )
    try:
        return _facts(folder, files)
    except DataError as error:
        raise ReproduceError(str(error)) from None


def _facts(folder: Path, files: list[Path]) -> Dataset:
    sizes = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
    kept = _kept_facts(folder)
    if kept.get("sizes") != sizes:
        hashes = json.dumps({file.name: sha256(file) for file in files}, sort_keys=True)
        kept = {
            "sizes": sizes,
            "digest": hashlib.sha256(hashes.encode()).hexdigest(),
            "bytes_per_token": _bytes_per_token(folder),
        }
        with suppress(OSError):  # a folder that only others may write to: then it is counted anew each time
            write_json(folder / _FACTS, kept)
    return Dataset(folder, kept["digest"], kept["bytes_per_token"], len(open_tokens(folder / "valid")))


def _kept_facts(folder: Path) -> dict[str, Any]:
    """{} where there are none, or none that can be read."""
    with suppress(DataError):
        found = read_json(folder / _FACTS) or {}
        if isinstance(found.get("digest"), str) and isinstance(found.get("bytes_per_token"), float):
            return found
    return {}


def _bytes_per_token(folder: Path) -> float:
    """UTF-8 bytes of the validation text over its tokens, the ends of documents included."""
    from sentencepiece import SentencePieceProcessor

    try:
        pieces = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        tokens = open_tokens(folder / "valid")
        decoded = (
            pieces.decode(tokens[start : start + _BATCH].astype(int).tolist())
            for start in range(0, len(tokens), _BATCH)
        )
        return sum(len(text.encode()) for text in decoded) / len(tokens)
    except (RuntimeError, IndexError, OSError, ZeroDivisionError) as error:
        raise ReproduceError(
            f"{folder / 'tokenizer.model'} cannot decode {folder / 'valid'}.bin ({error}): it must be the "
            "sentencepiece model that this text was tokenized with"
        ) from None
