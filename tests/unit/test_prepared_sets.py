# SPDX-License-Identifier: Apache-2.0
"""Prepared sets in use: the launcher's check of tokenizer and sizes, and the histogram of labels."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from launch import launcher
from launch.flags import LaunchError
from simreg_megatron.cli import app
from simreg_megatron.data import DataError, histogram
from simreg_megatron.data.encoding import write_dataset
from simreg_megatron.data.tokenizer import train_tokenizer
from tests.helpers.preparation import TEXTS, lines, make, train_hugging_face


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tokenizers of each kind and a set made with the first."""
    root = tmp_path_factory.mktemp("sets")
    for name, texts in (("first", TEXTS), ("second", TEXTS[:60])):
        train_tokenizer(texts, root / f"{name}.model", vocab_size=350)
    (root / "text.jsonl").write_bytes(lines(TEXTS))
    make(root / "set", root / "text.jsonl", tokenizer=root / "first.model", valid_share=0.1)
    face = train_hugging_face(root / "face")
    make(root / "face-set", root / "text.jsonl", tokenizer=face, valid_share=0.1)
    shutil.copytree(face, root / "other-face")
    changed = (face / "tokenizer_config.json").read_text().replace('"bos_token": "<s>"', '"bos_token": "</s>"')
    (root / "other-face" / "tokenizer_config.json").write_text(changed)
    return root


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """What a dry run of the tiny model says of these words."""
    monkeypatch.setattr(launcher, "check_with_megatron", lambda *_: None)  # imports it for good
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SIMREG_CPU"):
        monkeypatch.setenv(name, "1")

    def planned(*words: object) -> str:
        launcher._launch("llama", [*map(str, words), "--dry-run"])
        return capsys.readouterr().out

    return planned


def test_the_tokenizer_of_the_set_is_taken(place: Path, plan) -> None:
    for made, tokenizer in (("set", "first.model"), ("face-set", "face")):
        prefix = place / made
        told = plan("--data", prefix / "train", "--valid-data", prefix / "valid", "--tokenizer", place / tokenizer)
        assert "manifest" not in told


@pytest.mark.parametrize(
    ("made", "words", "sentence"),
    [
        ("set", ("--tokenizer", "second.model"), "made with another tokenizer .first.model. than .*second.model"),
        ("set", ("--tokenizer", "face"), "made with another tokenizer"),
        ("face-set", ("--tokenizer", "other-face"), "made with another tokenizer .face. than .*other-face"),
        ("set", ("--tokenizer", "first.model", "--vocab-size", "300"), "350 token ids and --vocab-size 300 has room"),
        ("set", ("--tokenizer", "first.model", "--seq-length", "90000"), "one sample needs 90001"),
    ],
)
def test_what_does_not_fit_is_refused(place: Path, plan, made: str, words: tuple[str, ...], sentence: str) -> None:
    words = (words[0], str(place / words[1]), *words[2:])
    with pytest.raises(LaunchError, match=sentence) as caught:
        plan("--data", place / made / "train", *words)
    assert "\n" not in str(caught.value)


def test_a_set_exchanged_under_its_manifest_is_seen(place: Path, plan, tmp_path: Path) -> None:
    shutil.copytree(place / "set", tmp_path / "set")
    write_dataset(tmp_path / "set" / "train", TEXTS[:200], place / "first.model")
    with pytest.raises(LaunchError, match=r"where manifest.json tells of \d+: it is another file"):
        plan("--data", tmp_path / "set" / "train", "--tokenizer", place / "first.model")


def test_without_a_manifest_one_notice(place: Path, plan, tmp_path: Path) -> None:
    for name in ("train", "valid"):
        write_dataset(tmp_path / name, TEXTS, place / "first.model")
    told = plan("--data", tmp_path / "train", "--valid-data", tmp_path / "valid", "--tokenizer", place / "second.model")
    assert told.count("has no manifest.json") == 1


@pytest.mark.parametrize("chunk", [1 << 22, 1000])
def test_labels_are_counted(place: Path, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histogram, "_CHUNK", chunk)
    for made, vocabulary in (("set", 350), ("face-set", 420)):
        labels = histogram.count_labels(place / made / "train")
        tokens = np.fromfile(place / made / "train.bin", dtype=np.uint16)
        expected = np.array([(tokens == token).sum() for token in range(vocabulary)])
        np.testing.assert_array_equal(labels.counts, expected)
        count, held = labels.top(0.02)
        assert count == -(-vocabulary * 2 // 100)
        assert held == np.sort(expected)[-count:].sum() / len(tokens)


def test_wide_ids_without_a_manifest(place: Path, tmp_path: Path) -> None:
    from simreg_megatron.data.indexed import PairWriter

    writer = PairWriter(tmp_path / "wide", "int32")
    writer.append(np.array([70000, 5, 5]), np.array([3]))
    writer.commit()
    labels = histogram.count_labels(tmp_path / "wide")
    assert len(labels.counts) == 70001 and labels.counts[[5, 70000]].tolist() == [2, 1] and labels.total == 3
    with pytest.raises(DataError, match="id 70000, beyond the vocabulary of 70000"):
        histogram.count_labels(tmp_path / "wide", vocab_size=70000)


def test_the_command_writes_numbers_and_a_plot(place: Path, tmp_path: Path) -> None:
    output = tmp_path / "labels.json"
    done = CliRunner().invoke(app, ["data", "histogram", str(place / "set" / "train"), "--output", str(output)])
    assert done.exit_code == 0, done.output
    written = json.loads(output.read_text())
    assert sum(written["counts"]) == written["labels"] and written["top"]["ids"] == 7
    assert f"hold {written['top']['share_of_labels']:.2%}" in done.output
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    missing = CliRunner().invoke(app, ["data", "histogram", str(tmp_path / "none")])
    assert missing.exit_code == 2
