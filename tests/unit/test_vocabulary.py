# SPDX-License-Identifier: Apache-2.0
"""An export takes the vocabulary of training or none: its size when Megatron has padded it, and its hash."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from launch import record
from launch.plan import Machine, build_plan
from simreg_megatron.checkpoint import verify
from simreg_megatron.checkpoint.errors import CheckpointError
from simreg_megatron.checkpoint.export import export, plan_export
from simreg_megatron.checkpoint.source import Checkpoint, open_checkpoint
from simreg_megatron.checkpoint.tokenizer import open_tokenizer
from simreg_megatron.checkpoint.vocabulary import check_size
from simreg_megatron.cli import app
from simreg_megatron.data.encoding import RECORD, describe_tokenizer
from simreg_megatron.data.tokenizer import train_tokenizer
from tests.helpers.checkpoints import DENSE, dist_checkpoint

PADDED = 1024  # of 900 pieces, to a multiple of 128 * TP 2
PADDING = {"make_vocab_size_divisible_by": 128, "tensor_model_parallel_size": 2, "padded_vocab_size": PADDED}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """own and foreign, of 900 pieces each; small, of 360."""
    root = tmp_path_factory.mktemp("words")
    for name, source, size in (("own", json, 900), ("foreign", subprocess, 900), ("small", json, 360)):
        text = Path(source.__file__).read_text()
        train_tokenizer([text], root / f"{name}.model", vocab_size=size)
    return root


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """OUTPUT, with checkpoints/iter_... of PADDED rows below."""
    dist_checkpoint(tmp_path / "run" / "checkpoints" / "iter_0000002", replace(DENSE, vocabulary=PADDED))
    return tmp_path / "run"


def trained(run: Path, **args: Any) -> Checkpoint:
    checkpoint = open_checkpoint(run / "checkpoints" / "iter_0000002")
    checkpoint.args.update({"vocab_size": None, "tokenizer_type": "HuggingFaceTokenizer", **PADDING, **args})
    return checkpoint


def recorded(run: Path, tokenizer: Path, stamp: str = "20260101-000000") -> None:
    """As a start of the launch scripts does it."""
    from launch.launcher import make_parser

    line = ["--data", "text", "--tokenizer", str(tokenizer), "--output", str(run)]
    options, rest = make_parser("llama").parse_known_args(line)
    record.write(build_plan("llama", options, rest, Machine(), environ={}), stamp, environ={})


@pytest.mark.parametrize(
    ("args", "size", "fits"),
    [
        (PADDING, 900, True),
        (PADDING, 769, True),
        (PADDING, 1024, True),
        (PADDING, 768, False),
        (PADDING, 1025, False),
        ({**PADDING, "tensor_model_parallel_size": 1}, 896, False),  # would be 896 rows
        ({**PADDING, "tensor_model_parallel_size": 1}, 897, True),
        ({}, 100, True),  # nobody wrote down how it was padded
        ({}, 1025, False),
        # Up to 0.15 Megatron added tokens of its own behind those of a sentencepiece model.
        ({**PADDING, "tokenizer_type": "SentencePieceTokenizer"}, 762, True),
        ({**PADDING, "tokenizer_type": "SentencePieceTokenizer"}, 761, False),
        ({**PADDING, "tokenizer_type": "SentencePieceTokenizer", "vocab_extra_ids": 100}, 662, True),
    ],
)
def test_sizes_that_megatron_pads_to_these_rows(args: dict[str, Any], size: int, fits: bool) -> None:
    if fits:
        check_size(args, size, PADDED, "it")
        return
    with pytest.raises(CheckpointError, match=f"^it stands for {size} tokens.*the checkpoint has 1024 rows: give the"):
        check_size(args, size, PADDED, "it")


def test_a_wrong_size_is_refused_with_the_way_out(run: Path, words: Path) -> None:
    checkpoint = trained(run, tokenizer_model="/gone/own.model", tensor_model_parallel_size=1)
    sentence = r"360 tokens, which Megatron pads to 384 rows, .* 1024 rows: give .* \(/gone/own.model\), or leave out"
    with pytest.raises(CheckpointError, match=sentence):
        plan_export(checkpoint, tokenizer=open_tokenizer(words / "small.model"))
    with pytest.raises(CheckpointError, match="--vocab-size 360 stands for 360 tokens"):
        plan_export(checkpoint, vocabulary=360)
    with pytest.raises(CheckpointError, match="--vocab-size 400 has no room for the 900 tokens"):
        plan_export(checkpoint, tokenizer=open_tokenizer(words / "own.model"), vocabulary=400)
    assert plan_export(checkpoint).architecture.vocabulary == PADDED, "the way out"


@pytest.mark.parametrize(
    ("args", "kept"),
    [
        ({"vocab_size": 700}, PADDED),  # a Hugging Face tokenizer passes over --vocab-size
        ({"vocab_size": 900, "tokenizer_type": "TikTokenizer"}, 900),
        ({"vocab_size": 700, "tokenizer_type": "TikTokenizer"}, PADDED),  # which would be 768 rows
        ({"vocab_size": 900, "tokenizer_type": "NullTokenizer"}, PADDED),  # 901 in some releases
    ],
)
def test_a_recorded_size_counts_only_where_training_built_by_it(args: dict[str, Any], kept: int, run: Path) -> None:
    plan = plan_export(trained(run, **args))
    assert plan.architecture.vocabulary == kept
    assert any("keeps the rows that Megatron added (1024 in all)" in note for note in plan.notes) == (kept == PADDED)


def test_the_record_of_the_run_tells_the_tokenizer(run: Path, words: Path) -> None:
    recorded(run, words / "small.model")
    recorded(run, words / "own.model", "20260102-000000")  # of a later start
    checkpoint = trained(run, tokenizer_model="/gone/own.model")
    assert plan_export(checkpoint, tokenizer=open_tokenizer(words / "own.model")).notes == []
    with pytest.raises(CheckpointError, match=r"foreign.model is not the tokenizer of training, .*own.model: its hash"):
        plan_export(checkpoint, tokenizer=open_tokenizer(words / "foreign.model"))
    copied = run / "copied.model"
    copied.write_bytes((words / "own.model").read_bytes())
    assert plan_export(checkpoint, tokenizer=open_tokenizer(copied)).notes == [], "wherever it lies"


def test_without_a_record_the_named_file_tells(run: Path, words: Path) -> None:
    checkpoint = trained(run, tokenizer_model=str(words / "own.model"))
    assert plan_export(checkpoint, tokenizer=open_tokenizer(words / "own.model")).notes == []
    with pytest.raises(CheckpointError, match="is not the tokenizer of training"):
        plan_export(checkpoint, tokenizer=open_tokenizer(words / "foreign.model"))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"kind": 1}'])
def test_what_nobody_can_tell_is_said(run: Path, words: Path, text: str) -> None:
    folder = run / "record" / "20260101-000000"
    folder.mkdir(parents=True)
    (folder / RECORD).write_text(text)
    notes = plan_export(trained(run), tokenizer=open_tokenizer(words / "own.model")).notes
    assert len(notes) == 1 and "nothing shows whether" in notes[0]


def test_another_form_of_the_tokenizer_is_taken_with_a_note(run: Path, words: Path, tmp_path: Path) -> None:
    """A converted sentencepiece model has another hash, and a folder of its own."""
    recorded(run, words / "own.model")
    checkpoint = trained(run)
    export(plan_export(checkpoint, tokenizer=open_tokenizer(words / "own.model")), tmp_path / "model")
    assert describe_tokenizer(str(tmp_path / "model")).sha256 != describe_tokenizer(str(words / "own.model")).sha256
    notes = plan_export(checkpoint, tokenizer=open_tokenizer(tmp_path / "model")).notes
    assert len(notes) == 1 and "of another form than the tokenizer of training" in notes[0]


def test_an_imported_model_keeps_rows_beyond_its_tokenizer(run: Path, words: Path) -> None:
    """Hugging Face models may have more rows than tokens; such a checkpoint was never padded."""
    checkpoint = open_checkpoint(run / "checkpoints" / "iter_0000002")
    assert checkpoint.args["vocab_size"] == PADDED and "make_vocab_size_divisible_by" not in checkpoint.args
    assert plan_export(checkpoint, tokenizer=open_tokenizer(words / "own.model")).architecture.vocabulary == PADDED


def test_verify_takes_no_vocabulary_but_that_of_training(run: Path, tmp_path: Path, monkeypatch) -> None:
    checkpoint = trained(run)
    export(plan_export(checkpoint, vocabulary=900), tmp_path / "model")
    checkpoint.args["tensor_model_parallel_size"] = 1  # 900 would be 1024 rows, 360 would not
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 900', '"vocab_size": 360'))
    monkeypatch.setattr(verify, "_megatron_logits", lambda *_: pytest.fail("asked before any model is run"))
    with pytest.raises(CheckpointError, match=r"the exported .*model stands for 360 tokens"):
        verify.verify(checkpoint, tmp_path / "model")


@pytest.mark.parametrize(("umask", "file", "folder"), [(0o022, 0o644, 0o755), (0o027, 0o640, 0o750)])
def test_exported_files_have_the_modes_of_the_umask(umask: int, file: int, folder: int, run: Path, words: Path) -> None:
    before = os.umask(umask)
    try:
        words_of_command = ["export-hf", "--load", str(run / "checkpoints" / "iter_0000002"), "--save"]
        done = CliRunner().invoke(app, [*words_of_command, str(run / "model"), "--vocab-size", "900"])
    finally:
        os.umask(before)
    assert done.exit_code == 0, done.output
    assert (run / "model").stat().st_mode & 0o777 == folder
    modes = {path.name: path.stat().st_mode & 0o777 for path in (run / "model").iterdir()}
    assert len(modes) >= 3 and set(modes.values()) == {file}, modes


def test_a_full_disk_is_one_sentence_and_leaves_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    def full(*_: Any, **__: Any) -> None:
        raise safetensors.SafetensorError("Error while serializing: I/O error: Os { code: 28, kind: StorageFull }")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    words = ["export-hf", "--load", str(run / "checkpoints" / "iter_0000002"), "--save", str(run / "model")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2 and done.stderr.startswith("error: model.safetensors of "), done.output
    assert "StorageFull" in done.stderr and sorted(path.name for path in run.iterdir()) == ["checkpoints"]
