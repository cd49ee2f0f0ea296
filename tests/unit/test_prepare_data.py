# SPDX-License-Identifier: Apache-2.0
"""`data prepare`: the bytes of every kind of source, what resumes, and what is refused in one sentence."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zstandard

from simreg_megatron import cli
from simreg_megatron.tools import prepare_data
from simreg_megatron.tools.indexed import DataError, PairWriter, read_lengths, read_tokens
from simreg_megatron.tools.prepare_data import prepare
from simreg_megatron.tools.tokenizers import load_tokenizer

FIXTURES = Path(__file__).parents[1] / "fixtures" / "data"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())
TOKENIZERS = {"sentencepiece": FIXTURES / "tokenizer.model", "huggingface": FIXTURES / "tokenizer"}
LINES = (FIXTURES / "texts.jsonl").read_bytes().splitlines(keepends=True)
MODEL = str(TOKENIZERS["sentencepiece"])


def write_source(folder: Path, form: str, lines: list[bytes]) -> str:
    """Write the texts of the fixture in one form, and return the word of the command line."""
    folder.mkdir(parents=True)
    raw, half = b"".join(lines), b"".join(lines[: len(lines) // 2])
    texts = [json.loads(line)["text"] for line in lines]
    path = folder / f"texts.{form}"
    if form == "jsonl":
        path.write_bytes(raw)
    elif form == "jsonl.gz":
        path.write_bytes(gzip.compress(half) + gzip.compress(raw[len(half) :]))
    elif form == "jsonl.zst":
        compress = zstandard.ZstdCompressor().compress
        path.write_bytes(compress(half) + compress(raw[len(half) :]))
    elif form == "parquet":
        pq.write_table(pa.table({"n": range(len(texts)), "text": texts}), path, row_group_size=7)
    elif form == "hf":  # as a data set of the Hub, from a folder
        pq.write_table(pa.table({"text": texts}), folder / "train-00000-of-00001.parquet")
        return f"hf:{folder}"
    else:
        for number, text in enumerate(texts):
            (folder / f"{number:03}.txt").write_bytes(text.encode())
        return str(folder)
    return str(path)


def digests(manifest: dict[str, Any]) -> dict[str, str]:
    return {name: facts["sha256"] for name, facts in manifest["files"].items()}


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "txt", "hf"])
def test_same_bytes_as_recorded(tmp_path: Path, form: str, kind: str) -> None:
    source = write_source(tmp_path / "a", form, LINES)
    expected, tokenizer = EXPECTED[kind], str(TOKENIZERS[kind])
    shared = prepare([source], tmp_path / "share", tokenizer=tokenizer, valid_share=0.2)
    assert digests(shared) == expected["share"]["files"] and shared["tokens"] == expected["share"]["tokens"]
    assert shared["tokenizer_sha256"] == expected["sha256"] and shared["empty_documents"] == 2
    limited = prepare([source], tmp_path / "tokens", tokenizer=tokenizer, valid_share=0.2, tokens=1500)
    assert expected["tokens"]["files"].items() <= digests(limited).items()
    if form != "hf":
        valid = write_source(tmp_path / "v", form, LINES[30:])
        apart = prepare([source], tmp_path / "valid", tokenizer=tokenizer, valid=[valid], valid_tokens=500)
        assert digests(apart) == expected["valid"]["files"]
