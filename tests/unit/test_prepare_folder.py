# SPDX-License-Identifier: Apache-2.0
"""What lies in the folder of a set before and after: other people's files, parts of other settings, mended sources."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from typer.testing import CliRunner

from simreg_megatron.data import DataError, assemble, begin, prepare
from simreg_megatron.data.commands import app
from simreg_megatron.data.prepare import merge
from simreg_megatron.data.settings import write_json
from simreg_megatron.data.task import Silent
from simreg_megatron.data.tokenizer import train_tokenizer
from tests.helpers.preparation import BLOCK, TEXTS, content, lines, make
from tests.unit.test_prepare import here  # noqa: F401 - a fixture


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    train_tokenizer(TEXTS, path, vocab_size=400)
    return path


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Three files of some blocks each."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.jsonl").write_bytes(lines(TEXTS[number * 60 : number * 60 + 60]))
    return folder


class Told(Silent):
    def __init__(self) -> None:
        self.sentences: list[str] = []

    def tell(self, sentence: str) -> None:
        self.sentences.append(sentence)


def files_of(folder: Path) -> dict[str, bytes]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".lock"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


pytestmark = pytest.mark.usefixtures("here")


# --- What is not this program's --------------------------------------------------------------------


@pytest.mark.parametrize("source", ["parts", "parts/deep", "."])
def test_sources_among_the_parts_stay(tokenizer: Path, tmp_path: Path, source: str) -> None:
    (tmp_path / "data/parts/deep").mkdir(parents=True)
    (tmp_path / "data/parts/deep/a.jsonl").write_bytes(lines(TEXTS[:40]))
    before = files_of(tmp_path / "data")
    with pytest.raises(DataError, match=r"a.jsonl lies in .*/data/parts, where the parts of the set are made"):
        make(tmp_path / "data", tmp_path / "data" / source, tokenizer=tokenizer)
    assert files_of(tmp_path / "data") == before


def test_a_users_own_parts_are_refused(texts: Path, tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "out/parts/train/000000").mkdir(parents=True)
    with pytest.raises(DataError, match=r"out/parts/train is there and not of this command"):
        make(tmp_path / "out", texts, tokenizer=tokenizer)


def test_only_what_was_written_is_removed(texts: Path, tokenizer: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    make(out, texts, tokenizer=tokenizer, shard=(0, 1000))
    mine = ("parts/notes.txt", "parts/train/000000/notes.txt", "parts/train/notes/a.npz", "parts/extra/a.npz")
    for name in mine:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("a user's own")
    for name in ("parts/train/000001/000004.npz.writing-7", "parts/settings.json.writing-7", "manifest.json.writing-7"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("of a killed process")
    make(out, texts, tokenizer=tokenizer)
    left = {name for name in files_of(out) if name.startswith("parts") or "writing" in name}
    assert left == set(mine)


def test_a_foreign_manifest_makes_no_set(texts: Path, tokenizer: Path, tmp_path: Path) -> None:
    for text in ('{"files": {}}', '{"format": 1, "name": "an app"}', '{"format": 2, "settings": {"a": 1}}'):
        folder = tmp_path / "any"
        (folder / "parts").mkdir(parents=True, exist_ok=True)
        (folder / "parts" / "thesis.txt").write_text("of years")
        (folder / "manifest.json").write_text(text)
        before = files_of(folder)
        with pytest.raises(DataError, match=r"any/manifest.json is not what this program writes"):
            merge(folder)
        done = CliRunner().invoke(app, ["merge", str(folder)])
        assert done.exit_code == 2 and files_of(folder) == before


# --- Parts of two kinds ----------------------------------------------------------------------------


@pytest.mark.parametrize("other", [{"key": "other"}, {"bos": "document"}, {"block_bytes": 2 * BLOCK}])
def test_parts_of_other_settings_are_not_merged(
    texts: Path, tokenizer: Path, tmp_path: Path, other: dict[str, Any]
) -> None:
    """Shards that had no shared folder: their parts are copied into one, and the settings of the last stay."""
    for path in texts.iterdir():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row | {"other": row["text"][::-1]}) + "\n" for row in rows))
    make(tmp_path / "one", texts, tokenizer=tokenizer, shard=(0, 2))
    make(tmp_path / "two", texts, tokenizer=tokenizer, shard=(1, 2), **other)
    for first, last in (("one", "two"), ("two", "one")):
        for name in (first, last):
            shutil.copytree(tmp_path / name / "parts", tmp_path / "both" / "parts", dirs_exist_ok=True)
        with pytest.raises(DataError, match=r"both/parts/train/\d+/\d+.npz was made of another source or with other"):
            merge(tmp_path / "both")
        shutil.rmtree(tmp_path / "both")


def test_the_same_settings_are_merged(texts: Path, tokenizer: Path, tmp_path: Path) -> None:
    """Where broken lines are skipped and the budget are no part of a part."""
    make(tmp_path / "whole", texts, tokenizer=tokenizer)
    make(tmp_path / "one", texts, tokenizer=tokenizer, shard=(0, 2))
    make(tmp_path / "two", texts, tokenizer=tokenizer, shard=(1, 2), on_error="skip", tokens=10**9)
    for name in ("one", "two"):
        shutil.copytree(tmp_path / name / "parts", tmp_path / "both" / "parts", dirs_exist_ok=True)
    merge(tmp_path / "both")
    assert content(tmp_path / "both")["train.bin"] == content(tmp_path / "whole")["train.bin"]


def test_a_shard_takes_no_parts_of_another_source(texts: Path, tokenizer: Path, tmp_path: Path) -> None:
    """Two runs whose files have the same names and sizes."""
    make(tmp_path / "one", texts, tokenizer=tokenizer, shard=(0, 2))
    data = (texts / "1.jsonl").read_bytes()
    (texts / "1.jsonl").write_bytes(data.replace(b"word", b"WORD"))
    make(tmp_path / "two", texts, tokenizer=tokenizer, shard=(0, 2))
    shutil.copytree(tmp_path / "one/parts/train", tmp_path / "two/parts/train", dirs_exist_ok=True)
    with pytest.raises(DataError, match=r"two/parts/train/000001/\d+.npz was made of another source"):
        make(tmp_path / "two", texts, tokenizer=tokenizer, shard=(0, 2))


def test_parts_of_an_older_version_start_again(texts: Path, tokenizer: Path, tmp_path: Path) -> None:
    make(tmp_path, texts, tokenizer=tokenizer, shard=(0, 2))
    path = tmp_path / "parts" / "settings.json"
    write_json(path, _as_older(json.loads(path.read_text())))
    for call in (lambda: make(tmp_path, texts, tokenizer=tokenizer, shard=(0, 2)), lambda: merge(tmp_path)):
        with pytest.raises(DataError, match=r"an older version began .*/parts.*: remove it"):
            call()


def test_a_set_of_an_older_version_is_done(texts: Path, tokenizer: Path, tmp_path: Path) -> None:
    tmp_path = tmp_path / "out"
    make(tmp_path, texts, tokenizer=tokenizer)
    path = tmp_path / "manifest.json"
    write_json(path, _as_older(json.loads(path.read_text())))
    before = content(tmp_path)
    assert make(tmp_path, texts, tokenizer=tokenizer) == json.loads(path.read_text()) == merge(tmp_path)
    assert content(tmp_path) == before
    with pytest.raises(DataError, match=r"other settings .key"):
        make(tmp_path, texts, tokenizer=tokenizer, key="other")


def _as_older(found: dict[str, Any]) -> dict[str, Any]:
    settings = found["settings"]
    sources = [{name: one[name] for name in one if name != "ends_sha256"} for one in settings["train_sources"]]
    return found | {"settings": settings | {"format": 1, "train_sources": sources}}


def test_shards_that_start_together_see_each_other(
    texts: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between another's look at the settings and its writing of them, no shard may look."""
    monkeypatch.setattr(prepare, "_PATIENCE", 0.1)
    look, seen = begin.read_json, []

    def looked(path: Path) -> Any:
        with pytest.raises(DataError, match="another process is preparing"):
            if not seen:
                seen.append(path)
                make(tmp_path / "out", texts, tokenizer=tokenizer, key="other", shard=(1, 2))
            raise DataError("another process is preparing")
        return look(path)

    monkeypatch.setattr(begin, "read_json", looked)
    make(tmp_path / "out", texts, tokenizer=tokenizer, shard=(0, 2))
    with FileLock(tmp_path / "out" / ".prepare-settings.lock"), pytest.raises(DataError, match="another process"):
        make(tmp_path / "out", texts, tokenizer=tokenizer, shard=(1, 2))


def test_a_budget_for_a_finished_set_is_refused(texts: Path, tokenizer: Path, tmp_path: Path) -> None:
    make(tmp_path, texts, tokenizer=tokenizer, tokens=2000)
    assert merge(tmp_path, {"train": 2000, "valid": None}) == merge(tmp_path)
    with pytest.raises(DataError, match=r"other settings .train: 2000 then, 1000 now"):
        merge(tmp_path, {"train": 1000, "valid": None})


# --- Mended sources --------------------------------------------------------------------------------


def test_a_mended_file_is_made_again_and_the_others_are_kept(texts: Path, tokenizer: Path, tmp_path: Path) -> None:
    good = (texts / "1.jsonl").read_bytes()
    (texts / "1.jsonl").write_bytes(good + b'{"text": "never closed\n')
    with pytest.raises(DataError, match=r"1.jsonl, line 61: .*finished work on other files is kept"):
        make(tmp_path / "out", texts, tokenizer=tokenizer)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("out/parts/train/000000/*.npz")}
    assert kept and list(tmp_path.glob("out/parts/train/000001/*.npz"))
    (texts / "1.jsonl").write_bytes(good + lines(["closed"]))
    told = Told()
    make(tmp_path / "out", texts, tokenizer=tokenizer, shard=(0, 2))
    prepare.prepare(prepare.Task([str(texts)], tmp_path / "out", str(tokenizer), block_bytes=BLOCK), told)
    assert not told.sentences, "the shard before has told it"
    make(tmp_path / "whole", texts, tokenizer=tokenizer)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_what_is_made_again_is_told(texts: Path, tokenizer: Path, tmp_path: Path) -> None:
    make(tmp_path / "out", texts, tokenizer=tokenizer, shard=(0, 2))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("out/parts/train/*/*.npz")}
    (texts / "1.jsonl").write_bytes((texts / "1.jsonl").read_bytes() + lines(["more"]))
    told = Told()
    task = prepare.Task([str(texts)], tmp_path / "out", str(tokenizer), block_bytes=BLOCK, shard=(0, 2))
    prepare.prepare(task, told)
    assert told.sentences == ["1.jsonl has changed: what was made of it is made again"]
    same = {path for path, time in before.items() if path.stat().st_mtime_ns == time}
    assert {path.parent.name for path in same} == {"000000", "000002"}
    assert {path.parent.name for path in before if path not in same} == {"000001"}


def test_other_sources_of_the_same_names_are_refused(texts: Path, tokenizer: Path, tmp_path: Path) -> None:
    make(tmp_path / "out", texts, tokenizer=tokenizer, shard=(0, 2))
    kept = files_of(tmp_path / "out" / "parts" / "train")
    for path in texts.iterdir():
        path.write_bytes(path.read_bytes().replace(b"word", b"WORD"))
    with pytest.raises(DataError, match=r'other settings .train_sources: ."name": "0.jsonl"'):
        make(tmp_path / "out", texts, tokenizer=tokenizer, shard=(0, 2))
    assert files_of(tmp_path / "out" / "parts" / "train") == kept


def test_the_first_source_that_differs_is_named(texts: Path, tokenizer: Path, tmp_path: Path) -> None:
    for number in range(3, 40):
        (texts / f"{number:02d}.jsonl").write_bytes(lines([f"text {number}"]))
    make(tmp_path / "out", texts, tokenizer=tokenizer)
    (texts / "25.jsonl").write_bytes(lines(["mended"]))
    with pytest.raises(DataError, match=r'train_sources: ."name": "25.jsonl".* then, ."name": "25.jsonl"'):
        make(tmp_path / "out", texts, tokenizer=tokenizer)
    (texts / "25.jsonl").unlink()
    with pytest.raises(DataError, match=r'train_sources: ."name": "25.jsonl".* then, ."name": "26.jsonl"'):
        make(tmp_path / "out", texts, tokenizer=tokenizer)


# --- Validation text among the training text -------------------------------------------------------


def test_validation_text_is_left_out_of_the_training_text(texts: Path, tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "valid.jsonl").symlink_to(texts / "1.jsonl")
    task = prepare.Task(
        [str(texts)], tmp_path / "out", str(tokenizer), [str(tmp_path / "elsewhere/valid.jsonl")], block_bytes=BLOCK
    )
    told = Told()
    manifest = prepare.prepare(task, told)
    assert manifest is not None and manifest["documents"] == {"train": 120, "valid": 60}
    assert told.sentences == [f"{texts}/1.jsonl is for validation, so it is left out of the training text"]
    make(tmp_path / "apart", texts / "0.jsonl", texts / "2.jsonl", tokenizer=tokenizer)
    assert content(tmp_path / "out")["train.bin"] == content(tmp_path / "apart")["train.bin"]
    with pytest.raises(DataError, match=r"all of .*texts is given as --valid as well"):
        make(tmp_path / "none", texts, tokenizer=tokenizer, valid_sources=[str(texts)])


def test_a_name_that_is_no_utf_8(tokenizer: Path, tmp_path: Path) -> None:
    import os

    (tmp_path / "texts").mkdir()
    name = os.fsdecode(b"caf\xe9 \xe6\x9d\xb1.jsonl")
    (tmp_path / "texts" / name).write_bytes(lines(TEXTS[:20]))
    manifest = make(tmp_path / "out", tmp_path / "texts", tokenizer=tokenizer)
    assert manifest is not None and manifest["settings"]["train_sources"][0]["name"] == name
    assert make(tmp_path / "out", tmp_path / "texts", tokenizer=tokenizer) == manifest
    assert "\u6771" in (tmp_path / "out" / "manifest.json").read_text()


def test_a_killed_worker_is_told_with_its_text(
    texts: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from concurrent.futures.process import BrokenProcessPool

    def killed(*_: object) -> None:
        raise BrokenProcessPool("killed")

    monkeypatch.setattr(prepare, "work", killed)
    with pytest.raises(DataError, match=r"--workers; all .*look from .*texts/0.jsonl, line 1 or .* very long document"):
        make(tmp_path / "out", texts, tokenizer=tokenizer)


def test_temporary_names_never_meet(tmp_path: Path) -> None:
    """Processes on nodes may have the same number."""
    from simreg_megatron.data.indexed import whole_file

    with whole_file(tmp_path / "a") as first, whole_file(tmp_path / "a") as second:
        first.write(b"1")
        second.write(b"22")
        assert len(list(tmp_path.iterdir())) == 2
    assert (tmp_path / "a").read_bytes() == b"1" and len(list(tmp_path.iterdir())) == 1


def test_a_join_meets_no_other(texts: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`merge` beside `prepare` once wrote the same train.bin, and the manifest spoke of what one of them had meant."""
    for shard in ((0, 2), (1, 2)):
        make(tmp_path / "out", texts, tokenizer=tokenizer, shard=shard)
    append, told = assemble._append, []

    def meanwhile(*given: Any) -> bool:
        if not told:
            with pytest.raises(DataError, match=r"another process .*remove .*\.prepare-assemble\.lock") as caught:
                make(tmp_path / "out", texts, tokenizer=tokenizer)
            told.append(caught)
        return append(*given)

    monkeypatch.setattr(assemble, "_append", meanwhile)
    manifest = prepare.merge(tmp_path / "out")
    assert told
    for name, said in manifest["files"].items():
        assert hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest() == said["sha256"]


def test_what_a_kill_left_makes_room(texts: Path, tokenizer: Path, tmp_path: Path) -> None:
    """Killed between the files' names and the manifest, a set was written again beside the old one."""
    for shard in ((0, 2), (1, 2)):
        make(tmp_path / "out", texts, tokenizer=tokenizer, shard=shard)
    for name in ("train.bin", "train.idx.writing-12ab", "valid.bin"):
        (tmp_path / "out" / name).write_bytes(b"of before")
    manifest = prepare.merge(tmp_path / "out")
    left = {path.name for path in (tmp_path / "out").iterdir() if path.is_file() and not path.name.startswith(".")}
    assert left == {"manifest.json", *manifest["files"]}
