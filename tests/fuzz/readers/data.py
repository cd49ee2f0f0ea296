# SPDX-License-Identifier: Apache-2.0
"""Prepared sets and what they are made of: indices, manifests, parts, and text in every form that is read."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from simreg_megatron.data.assemble import MANIFEST, SETTINGS, assemble, store_of
from simreg_megatron.data.check import check_dataset, check_split
from simreg_megatron.data.histogram import count_labels
from simreg_megatron.data.indexed import DataError, PairWriter
from simreg_megatron.data.pairs import explain_missing
from simreg_megatron.data.parts import PartHeader, read_part, write_part
from simreg_megatron.data.settings import fingerprint
from simreg_megatron.data.sources import find_inputs
from simreg_megatron.data.tokens import document_lengths
from tests.fuzz.target import Target

BLOCK = 1 << 14  # bytes of text in one block
KEPT: dict[str, Any] = {
    "settings": {
        "format": 2, "tokenizer": {"vocab_size": 9, "eos_id": 2, "bos_id": None, "sha256": "0"},
        "train_sources": [{"name": "a"}], "valid_sources": [],
    },
    "budget": {"train": None, "valid": None}, "dtype": "uint16", "tokenizer_name": "tokenizer.model",
}  # fmt: skip
_LENGTHS = np.array([3, 0, 2], np.int32)
_TOKENS = np.arange(5, dtype=np.uint16)


def write_pair(prefix: Path) -> None:
    writer = PairWriter(prefix, "uint16")
    writer.append(_TOKENS, _LENGTHS)
    writer.commit()


def write_one_part(path: Path) -> None:
    made_with = fingerprint(KEPT["settings"], KEPT["settings"]["train_sources"][0])
    counts = {"documents": {"train": 3, "valid": 0}, "tokens": {"train": 5, "valid": 0}}
    header = PartHeader(is_last=True, weight=10, made_with=made_with, **counts)
    none = np.zeros(0, np.uint16)
    arrays = {"train_lengths": _LENGTHS, "train_tokens": _TOKENS}
    write_part(path, header, arrays | {"valid_lengths": none.astype(np.int32), "valid_tokens": none})


# ---- what is read ----------------------------------------------------------------------------------------------------


def _pair(folder: Path) -> None:
    write_pair(folder / "train")


def _index(folder: Path, data: bytes) -> None:
    (folder / "train.idx").write_bytes(data)
    check_dataset(folder / "train", seq_length=2)
    check_split(folder / "train", "50,50,0")
    count_labels(folder / "train")
    document_lengths(folder / "train")


def _manifest(folder: Path, data: bytes) -> None:
    (folder / MANIFEST).write_bytes(data)
    explain_missing(folder / "valid")
    check_dataset(folder / "train", vocab_size=100)
    count_labels(folder / "train")
    assemble(folder)


def _parts(folder: Path) -> None:
    write_one_part(store_of(folder / "kept", "train").path(0, 0))


def _assembled(folder: Path) -> None:
    """From a copy: what is assembled takes its parts away."""
    shutil.rmtree(folder / "made", ignore_errors=True)
    shutil.copytree(folder / "kept", folder / "made")
    assemble(folder / "made")


def _settings(folder: Path, data: bytes) -> None:
    (folder / "kept" / SETTINGS).write_bytes(data)
    _assembled(folder)


def _part(folder: Path, data: bytes) -> None:
    path = store_of(folder / "kept", "train").path(0, 0)
    path.write_bytes(data)
    read_part(path)
    from tests.fuzz.target import CORPUS

    (settings,) = (CORPUS / "settings").iterdir()
    (folder / "kept" / SETTINGS).write_bytes(settings.read_bytes())
    _assembled(folder)


def _text(name: str, *, compress=lambda data: data):  # type: ignore[no-untyped-def]
    def read(folder: Path, data: bytes) -> None:
        (folder / name).write_bytes(compress(data))
        for source in find_inputs([str(folder / name)]):
            source.identity()
            for block in source.blocks(BLOCK, lambda number: True):
                for record in block.records("text"):
                    if record.problem:
                        block.where(record.number)

    return read


def _zstandard(data: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor().compress(data)


_ERRORS = (DataError,)
_LINES = (b'{"text": ', b"\n", b'"\\ud800"', b"}", b"[" * 3000, b"1" * 5000, b"NaN", b"\xff\xfe", b"\0", b'"text"')
_JSON = (
    b'"files"', b'"tokens"', b'"bytes"', b'"vocab_size"', b'"train.bin"', b"null", b"[]", b"{}", b"-1", b"1e999",
    b'"tokenizer_sha256"', b'"train_sources"', b'"settings"', b'"budget"', b'"dtype"', b'"object"', b"[" * 3000,
)  # fmt: skip
TARGETS = (
    Target("index", _index, _ERRORS, _pair),
    Target("manifest", _manifest, _ERRORS, _pair, _JSON),
    Target("settings", _settings, _ERRORS, _parts, _JSON),
    Target("part", _part, _ERRORS, _parts, (b"|O", b"<i8", b"(9999999999,)", b"True")),
    Target("jsonl", _text("text.jsonl"), _ERRORS, words=_LINES),
    Target("gzip", _text("text.jsonl.gz"), _ERRORS),
    Target("zstandard", _text("text.jsonl.zst"), _ERRORS),
    Target("gzip-inside", _text("text.jsonl.gz", compress=gzip.compress), _ERRORS, words=_LINES),
    Target("zstandard-inside", _text("text.jsonl.zst", compress=_zstandard), _ERRORS, words=_LINES),
    Target("parquet", _text("text.parquet"), _ERRORS, words=(b"PAR1", b"text", b"ARROW:schema")),
    Target("plain-text", _text("text.txt"), _ERRORS, words=(b"\xff", b"\xed\xa0\x80", b"\0")),
)
