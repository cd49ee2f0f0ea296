# SPDX-License-Identifier: Apache-2.0
"""Checks of a run's text before launch (its prefixes and blends: test_wrong_inputs.py)."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from launch import data, launcher
from launch.flags import LaunchError
from simreg_megatron.tools.builtin_corpus import write_pair
from simreg_megatron.tools.prepare_data import prepare
from simreg_megatron.tools.tokens import DataError, read_tokens, train_tokenizer
from tests.helpers.texts import TEXTS, lines, train_hugging_face


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tokenizers of each kind, and a set made with the first of each."""
    root = tmp_path_factory.mktemp("sets")
    for name, texts in (("first", TEXTS), ("second", TEXTS[:60])):
        train_tokenizer(texts, root / f"{name}.model", vocab_size=350)
    (root / "text.jsonl").write_bytes(lines(TEXTS))
    face = train_hugging_face(root / "face")
    for name, tokenizer in (("set", root / "first.model"), ("face-set", face)):
        prepare([str(root / "text.jsonl")], root / name, tokenizer=str(tokenizer), valid_share=0.1)
    shutil.copytree(face, root / "other-face")
    changed = (face / "tokenizer_config.json").read_text().replace('"bos_token": "<s>"', '"bos_token": "</s>"')
    (root / "other-face" / "tokenizer_config.json").write_text(changed)
    return root


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Return what a dry run of the tiny model prints."""
    monkeypatch.setattr(launcher.preflight, "check_with_megatron", lambda *_: None)  # imports it for good
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SIMREG_CPU"):
        monkeypatch.setenv(name, "1")

    def planned(*words: object) -> str:
        launcher._launch("llama", [*map(str, words), "--dry-run"])
        return capsys.readouterr().out

    return planned


def test_a_set_with_its_tokenizer_is_taken(place: Path, plan) -> None:
    """The dry run counts parameters with the vocabulary of the set."""
    for made, tokenizer, vocabulary in (("set", "first.model", 350), ("face-set", "face", 420)):
        prefix = place / made
        said = plan("--data", prefix / "train", "--valid-data", prefix / "valid", "--tokenizer", place / tokenizer)
        assert "no manifest" not in said and f"with a vocabulary of {vocabulary}" in said


MISFITS = [
    ("set", ("--tokenizer", "second.model"), r"made with another tokenizer \(first.model\) than .*second.model"),
    ("set", ("--tokenizer", "face"), "made with another tokenizer"),
    ("face-set", ("--tokenizer", "other-face"), r"made with another tokenizer \(face\) than .*other-face"),
    ("set", ("--tokenizer", "first.model", "--vocab-size", "300"), "350 token ids and --vocab-size 300 has room"),
    ("set", ("--tokenizer", "first.model", "--seq-length", "90000"), "one sample takes 90001"),
]


@pytest.mark.parametrize(("made", "words", "sentence"), MISFITS)
@pytest.mark.parametrize("flag", ["--data", "--data-path"])
def test_what_does_not_fit_is_refused(place: Path, plan, flag: str, made: str, words, sentence: str) -> None:
    with pytest.raises(LaunchError, match=sentence):
        plan(flag, place / made / "train", words[0], place / words[1], *words[2:])


def test_damaged_and_exchanged_files_are_refused(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "set", tmp_path / "set")
    prefix = str(tmp_path / "set" / "train")
    write_pair(Path(prefix), TEXTS[:200], place / "first.model")
    with pytest.raises(LaunchError, match=r"train\.bin has \d+ bytes and .*manifest\.json says \d+"):
        data.check_data([("--data-path", prefix)])
    half_right = '{"files": {"train.bin": {"bytes": 1}}, "vocab_size": "many"}'
    for foreign in ("[" * 20_000, "[]", '{"files": []}', half_right):
        (tmp_path / "set" / "manifest.json").write_text(foreign)
        assert "no manifest.json" in data.check_data([("--data-path", prefix)])[0]
    assert data.tokens_there([("--data-path", prefix)]) == len(read_tokens(prefix))
    content = Path(f"{prefix}.bin").read_bytes()
    Path(f"{prefix}.bin").write_bytes(content[:-2])
    with pytest.raises(DataError, match=r"has \d+ bytes and its \.idx says"):
        data.check_data([("--data-path", prefix)])
    index = Path(f"{prefix}.idx").read_bytes()
    for broken in (index[:-8], b"no index", b""):
        Path(f"{prefix}.idx").write_bytes(broken)
        with pytest.raises(DataError, match="is not a whole Megatron index"):
            data.check_data([("--data-path", prefix)])


def test_chats_are_left_to_megatron() -> None:
    flags = [("--data-path", "chats.jsonl")]
    with pytest.raises(DataError, match="there is no chats"):
        data.check_data(flags)
    assert all(data.check_data([*flags, (kind,)]) == [] for kind in ("--sft", "--use-varlen-dataset"))


def test_missing_text_is_said_before_a_tokenizer_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network the Hub was asked for a minute first."""
    monkeypatch.setattr("simreg_megatron.tools.tokens.load_tokenizer", lambda name: pytest.fail(f"fetched {name}"))
    flags = [("--data-path", "PREFIX"), ("--tokenizer-type", "HuggingFaceTokenizer"), ("--tokenizer-model", "PATH")]
    with pytest.raises(DataError, match="there is no PREFIX"):
        data.check_data(flags)


@pytest.mark.parametrize("spoil", ("text", "index"))
def test_indices_of_another_text_are_not_trained_on(place: Path, tmp_path: Path, spoil: str, monkeypatch) -> None:
    flags = [("--data-path", str(tmp_path / "train"))]
    folder = tmp_path / "train" / "cache" / "GPTDataset_indices"
    shutil.copytree(place / "set", tmp_path, dirs_exist_ok=True)
    folder.mkdir(parents=True)
    (folder / "1f-GPTDataset-train-description.txt").write_text(json.dumps({"dataset_path": str(tmp_path / "train")}))
    np.save(folder / "1f-GPTDataset-train-sample_index.npy", np.arange(40))
    assert data.drop_unusable_indices(flags) == [] and len(list(folder.iterdir())) == 2
    if spoil == "text":
        shutil.copy2(place / "set" / "valid.bin", tmp_path / "train.bin")  # with its old time
    else:
        os.truncate(folder / "1f-GPTDataset-train-sample_index.npy", 200)
        assert data.drop_unusable_indices(flags) == [], "another run may be writing it"
        monkeypatch.setattr(data, "_WRITE_SECONDS", 0)
    assert "are made again" in data.drop_unusable_indices(flags)[0] and not list(folder.iterdir())
