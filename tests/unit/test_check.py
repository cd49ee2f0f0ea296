# SPDX-License-Identifier: Apache-2.0
"""A split into sides as Megatron reads it, and the histogram's names, sizes and vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from simreg_megatron.data import DataError
from simreg_megatron.data.check import check_split
from simreg_megatron.data.commands import app
from simreg_megatron.data.histogram import count_labels
from simreg_megatron.data.indexed import PairWriter


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """A hundred documents of three tokens, ids up to 9."""
    writer = PairWriter(tmp_path / "train", "uint16")
    writer.append(np.arange(300) % 10, np.full(100, 3))
    writer.commit()
    return tmp_path / "train"


@pytest.mark.parametrize(
    ("split", "holds"),
    [
        ("99,1,0", True),
        ("98/2/0", True),
        ("98, 2", True),
        (".9 .1", True),
        ("1", True),
        ("999,1,0", False),
        ("0,1,1", False),
        ("999/1", False),
    ],
)
def test_a_split_in_all_forms_that_megatron_reads(prefix: Path, split: str, holds: bool) -> None:
    if holds:
        check_split(prefix, split)
    else:
        with pytest.raises(DataError, match=f"holds 100 documents, and --split {split} leaves none of them"):
            check_split(prefix, split)


@pytest.mark.megatron
@pytest.mark.parametrize("split", ["99,1,0", "98/2/0", ".9 .1", "1"])
def test_megatron_reads_it_so(split: str) -> None:
    from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split

    from simreg_megatron.data.check import _weights

    ours = _weights(split)
    assert parse_and_normalize_split(split)[: len(ours)] == pytest.approx([one / sum(ours) for one in ours])


@pytest.mark.parametrize("split", ["", "all", "0,0,0", "97,1,1,1", "1.2.3", "...", "9" * 400])
def test_what_is_no_split(prefix: Path, split: str) -> None:
    with pytest.raises(DataError, match=r"--split takes up to three weights, .* such as 99,1,0"):
        check_split(prefix, split)


def histogram(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["histogram", *map(str, words)])
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.exit_code, done.stderr


def test_the_plot_does_not_replace_the_numbers(prefix: Path) -> None:
    status, told = histogram(prefix, "--output", prefix.parent / "M.png")
    assert status == 2 and "--output names the JSON, and" in told and not (prefix.parent / "M.png").exists()


@pytest.mark.parametrize("size", [-1, 1 << 22])
def test_a_vocabulary_of_no_size(prefix: Path, size: int) -> None:
    status, told = histogram(prefix, "--vocab-size", size)
    assert status == 2 and f"--vocab-size takes a number of token ids, from 1 to 2097152, not {size}" in told


def test_a_manifest_that_speaks_of_others_decides_nothing(prefix: Path) -> None:
    path = prefix.parent / "manifest.json"
    for vocabulary in (5, 90):
        path.write_text(json.dumps({"vocab_size": vocabulary, "files": {"other.bin": {"bytes": 1}}}))
        assert len(count_labels(prefix).counts) == 10
    path.write_text(json.dumps({"vocab_size": 90, "files": {"train.bin": {"bytes": 600}}}))
    assert len(count_labels(prefix).counts) == 90
