# SPDX-License-Identifier: Apache-2.0
"""The built-in corpus and the checks of a data set."""

from __future__ import annotations

import json
import multiprocessing
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from simreg_megatron.data import DataError, check_dataset, ensure_builtin_corpus
from simreg_megatron.data.commands import app
from simreg_megatron.data.corpus import read_documents

SENTENCE = "This function number {i} of module {m} returns the sorted list of words that it was given by the caller. "


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like site-packages: many modules, each with docstrings of its own."""
    root = tmp_path_factory.mktemp("library")
    for module in range(60):
        functions = [
            f'def f{i}():\n    """{SENTENCE.format(i=i, m=module)} It takes about {i * 7 + module} steps."""\n'
            for i in range(20)
        ]
        (root / f"module{module}.py").write_text("".join(functions))
    (root / "explosive.py").write_text(
        '"""A module whose import would fail, though its documentation can be read all the same."""\nraise SystemExit\n'
    )
    return root


@pytest.fixture(scope="module")
def corpus(library: Path, tmp_path_factory: pytest.TempPathFactory):
    directory = tmp_path_factory.mktemp("corpus") / "builtin"
    return ensure_builtin_corpus(directory, vocab_size=400, roots=[library], progress=False)


def test_docstrings_are_read_not_imported(library: Path) -> None:
    documents = {document.name: document.text for document in read_documents([library], workers=1)}
    assert "can be read all the same" in documents["explosive.py"]
    assert documents["module3.py"].count("module 3 ") == 20


def test_a_docstring_stands_once_in_the_corpus(tmp_path: Path) -> None:
    text = f'"""{SENTENCE.format(i=1, m=1)}"""\n'
    (tmp_path / "first.py").write_text(text)
    (tmp_path / "second.py").write_text(text)
    assert [document.name for document in read_documents([tmp_path], workers=1)] == ["first.py"]


def test_code_foreign_text_and_scraps_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('"""Short."""\n')
    (tmp_path / "b.py").write_text('"""' + "x = {1: [2, 3], 4: (5, 6)}; " * 10 + '"""\n')
    (tmp_path / "c.py").write_text('"""' + "Быстрая бурая лиса " * 10 + '"""\n', encoding="utf-8")
    (tmp_path / "d.py").write_text("def broken(:\n")
    assert list(read_documents([tmp_path], workers=1)) == []


@pytest.mark.megatron
def test_corpus_is_what_megatron_reads(corpus) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from sentencepiece import SentencePieceProcessor

    tokenizer = SentencePieceProcessor(model_file=str(corpus.tokenizer_model))
    train, valid = (IndexedDataset(str(prefix)) for prefix in (corpus.train_prefix, corpus.valid_prefix))
    assert len(train) == corpus.manifest["documents"]["train"] > 40
    assert len(valid) == corpus.manifest["documents"]["valid"] > 0
    assert sum(map(len, train)) == corpus.manifest["tokens"]["train"]
    for document in train:
        ids = document.tolist()
        assert ids[-1] == tokenizer.eos_id() and ids.count(tokenizer.eos_id()) == 1
        assert tokenizer.bos_id() not in ids and tokenizer.unk_id() not in ids
    text = tokenizer.decode(train[1].tolist()[:-1])
    assert "returns the sorted list of words" in text
    assert {tokenizer.decode(d.tolist()) for d in train}.isdisjoint(tokenizer.decode(d.tolist()) for d in valid)


@pytest.mark.megatron
def test_same_inputs_give_the_same_bytes(corpus, library: Path, tmp_path: Path) -> None:
    again = ensure_builtin_corpus(tmp_path / "again", vocab_size=400, roots=[library], progress=False)
    assert again.manifest["files"] == corpus.manifest["files"]


def test_nothing_is_rebuilt_while_nothing_changed(corpus, library: Path) -> None:
    before = corpus.manifest_path.stat().st_mtime_ns
    again = ensure_builtin_corpus(corpus.directory, vocab_size=400, roots=[library], progress=False)
    assert again.manifest_path.stat().st_mtime_ns == before


def test_the_import_path_does_not_matter(
    corpus, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: other\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = corpus.manifest_path.stat().st_mtime_ns
    again = ensure_builtin_corpus(corpus.directory, vocab_size=400, roots=[library], progress=False)
    assert again.manifest_path.stat().st_mtime_ns == before


@pytest.mark.megatron
def test_a_damaged_corpus_is_rebuilt(library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = ensure_builtin_corpus(tmp_path / "c", vocab_size=400, roots=[library], progress=False)
    data = whole.train_prefix.with_suffix(".bin")
    data.write_bytes(data.read_bytes()[:-2])
    (tmp_path / "c.building-1").mkdir()  # what a killed build leaves
    mended = ensure_builtin_corpus(tmp_path / "c", vocab_size=400, roots=[library])
    assert "damaged, so it is built" in capsys.readouterr().out
    assert mended.manifest["files"] == whole.manifest["files"]
    check_dataset(mended.train_prefix, tokenizer=mended.tokenizer_model)
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".lock") == ["c"]


@pytest.mark.parametrize("name", ["notes.txt", "manifest.json", "train.bin"])
def test_a_folder_of_another_is_never_replaced(name: str, library: Path, tmp_path: Path) -> None:
    """Nor a set that `data prepare` made, which has a manifest as well."""
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / name).write_text('{"made_by": "someone", "files": {}}')
    with pytest.raises(DataError, match=r"thesis is there and is no built-in corpus.*name another folder"):
        ensure_builtin_corpus(folder, vocab_size=400, roots=[library], progress=False)
    assert [path.name for path in folder.iterdir()] == [name]


@pytest.mark.megatron
def test_an_empty_folder_is_taken(library: Path, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    assert ensure_builtin_corpus(tmp_path / "c", vocab_size=400, roots=[library], progress=False).manifest["tokens"]


def _ask(directory: Path, library: Path, answers) -> None:
    corpus = ensure_builtin_corpus(directory, vocab_size=400, roots=[library], progress=False)
    answers.put((corpus.manifest["files"]["train.bin"]["sha256"], corpus.manifest_path.stat().st_ino))


@pytest.mark.megatron
def test_one_process_builds_the_others_wait(library: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    asking = [context.Process(target=_ask, args=(tmp_path / "c", library, answers)) for _ in range(3)]
    for process in asking:
        process.start()
    given = {answers.get(timeout=120) for _ in asking}
    for process in asking:
        process.join()
    assert len(given) == 1, "all ranks must see the very same build"


def test_too_little_text_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="too little documentation"):
        ensure_builtin_corpus(tmp_path / "c", roots=[tmp_path / "empty"], progress=False)
    assert not (tmp_path / "c").exists()


def test_the_command_builds_it(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = partial(ensure_builtin_corpus, vocab_size=400, roots=[library])
    monkeypatch.setattr("simreg_megatron.data.ensure_builtin_corpus", small)
    result = CliRunner().invoke(app, ["corpus-builtin", "--out", str(tmp_path / "c")])
    tokens = json.loads((tmp_path / "c/manifest.json").read_text())["tokens"]
    assert result.exit_code == 0 and f"train: {tokens['train']:,} tokens" in result.stdout
    (tmp_path / "file").write_text("in the way")
    refused = CliRunner().invoke(app, ["corpus-builtin", "--out", str(tmp_path / "file/c")])
    assert refused.exit_code == 2 and refused.stderr.startswith("error: the built-in corpus cannot be written to")


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="cannot be written"):
        ensure_builtin_corpus(tmp_path / "file" / "c", roots=[tmp_path], progress=False)


@pytest.fixture
def copy(corpus, tmp_path: Path) -> Path:
    """A prefix whose files a test may break."""
    for name in ("train.bin", "train.idx", "manifest.json", "tokenizer.model"):
        (tmp_path / name).write_bytes((corpus.directory / name).read_bytes())
    check_dataset(tmp_path / "train", tokenizer=tmp_path / "tokenizer.model")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "damage", "sentence"),
    [
        ("train.bin", None, "there is no .*train.bin"),
        ("train.idx", None, "there is no .*train.idx"),
        ("train.bin", lambda data: b"", "train.bin is empty"),
        ("train.bin", lambda data: data[:-2], "cut off"),
        ("train.bin", lambda data: data + b"xx", "belongs to another index"),
        ("train.idx", lambda data: data[:60], "shorter than the"),
        ("train.idx", lambda data: b"not an index at all, but long enough to be one", "not a Megatron index"),
        ("train.idx", lambda data: data[:9] + b"\x07" + data[10:], "unknown version"),
        ("tokenizer.model", None, "does not exist"),
        ("tokenizer.model", lambda data: b"", "is empty"),
        ("tokenizer.model", lambda data: b"garbage" * 9, "not a sentencepiece model"),
    ],
)
def test_broken_files_are_named(copy: Path, name: str, damage, sentence: str) -> None:
    path = copy / name
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=sentence) as caught:
        check_dataset(copy / "train", tokenizer=copy / "tokenizer.model")
    assert "\n" not in str(caught.value)


def test_another_tokenizer_is_refused(copy: Path) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["tokenizer_sha256"] = "0" * 64
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="made with another tokenizer"):
        check_dataset(copy / "train", tokenizer=copy / "tokenizer.model")
