# SPDX-License-Identifier: Apache-2.0
"""The corpus that needs no download: what it reads, and one build for many processes."""

import json
import multiprocessing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.data import check_data
from simreg_megatron import cli
from simreg_megatron.tools import builtin_corpus
from simreg_megatron.tools.builtin_corpus import BuiltinCorpus, ensure_builtin_corpus
from simreg_megatron.tools.tokens import DataError, load_tokenizer, read_index, read_tokens

SENTENCE = "This function {i} of module {m} returns the sorted list of words that the reader found in the given text."


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like site-packages: many modules, each with docstrings of its own."""
    root = tmp_path_factory.mktemp("library")
    for module in range(60):
        functions = [
            f'def f{i}():\n    """{SENTENCE.format(i=i, m=module)} It takes about {i * 7 + module} steps."""\n'
            for i in range(20)
        ]
        (root / f"module{module}.py").write_text("".join(functions))
    return root


def build(directory: Path, library: Path) -> BuiltinCorpus:
    return ensure_builtin_corpus(directory, vocab_size=400, roots=[library])


@pytest.fixture(scope="module")
def corpus(library: Path, tmp_path_factory: pytest.TempPathFactory) -> BuiltinCorpus:
    return build(tmp_path_factory.mktemp("corpus") / "builtin", library)


def test_the_sides_hold_whole_documents_that_the_tokenizer_made(corpus: BuiltinCorpus) -> None:
    loaded = load_tokenizer(str(corpus.tokenizer_model))
    assert loaded.sha256.startswith("86d15ee4966fdb4c"), "docs/evidence.md knows its runs by the bytes of such a file"
    for side, prefix in (("train", corpus.train_prefix), ("valid", corpus.valid_prefix)):
        tokens, count = read_tokens(prefix), read_index(prefix).sequences
        lengths = np.fromfile(f"{prefix}.idx", np.int32, count, offset=34)
        assert (tokens[lengths.cumsum() - 1] == loaded.eos_id).all() and (tokens == loaded.eos_id).sum() == len(lengths)
        assert len(tokens) == corpus.manifest["tokens"][side] and len(lengths) == corpus.manifest["documents"][side] > 0
    flags = ("--train-data-path", str(corpus.train_prefix)), ("--tokenizer-model", str(corpus.tokenizer_model))
    assert check_data([*flags, ("--tokenizer-type", "SentencePieceTokenizer")]) == []


def test_only_a_damaged_corpus_is_built_again(corpus: BuiltinCorpus, library: Path, tmp_path, monkeypatch) -> None:
    info = tmp_path / "path" / "other-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: other\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path / "path"))  # the import path does not matter
    with monkeypatch.context() as patched:
        patched.setattr(builtin_corpus, "_build", lambda *_: pytest.fail("it is there"))
        assert build(corpus.directory, library) == corpus
    built = build(tmp_path / "c", library)
    assert built.manifest["files"] == corpus.manifest["files"], "the same text gives the same bytes"
    (tmp_path / "c" / "train.bin").write_bytes(b"cut")
    (tmp_path / "c" / "mine").touch()
    (tmp_path / "c" / "cache").mkdir()  # what a killed build leaves
    assert build(tmp_path / "c", library).manifest["files"] == corpus.manifest["files"]
    assert (tmp_path / "c" / "train.bin").stat().st_size > 3 and not (tmp_path / "c" / "cache").exists()
    assert (tmp_path / "c" / "mine").exists()
    (tmp_path / "c" / "manifest.json").write_text("{}")
    with pytest.raises(DataError, match="has another set: name another folder"):
        build(tmp_path / "c", library)


def _ask(directory: Path, library: Path, answers: Any) -> None:
    answers.put((build(directory, library).directory / "manifest.json").stat().st_ino)


def test_one_process_builds_and_the_others_wait(library: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    asking = [context.Process(target=_ask, args=(tmp_path / "c", library, answers)) for _ in range(3)]
    for process in asking:
        process.start()
    given = {answers.get(timeout=120) for _ in asking}
    for process in asking:
        process.join()
    assert len(given) == 1, "all ranks must see the same build"


def test_the_command(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    small = partial(ensure_builtin_corpus, vocab_size=400, roots=[library])
    monkeypatch.setattr(builtin_corpus, "ensure_builtin_corpus", small)
    assert cli.main(["data", "corpus-builtin", "--out", str(tmp_path / "c")]) == 0
    tokens = json.loads((tmp_path / "c/manifest.json").read_text())["tokens"]
    assert f"train: {tokens['train']:,} tokens" in capsys.readouterr().out
