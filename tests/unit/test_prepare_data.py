# SPDX-License-Identifier: Apache-2.0
"""`data prepare`: the bytes of every kind of source, what resumes, and what is refused in one sentence."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from filelock import FileLock

from simreg_megatron import cli
from simreg_megatron.tools import prepare_data, tokens
from simreg_megatron.tools.prepare_data import prepare
from simreg_megatron.tools.tokens import DataError, PairWriter, load_tokenizer, read_index, read_tokens
from tests.helpers.quick import quick
from tests.megatron import runs

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures" / "data"
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
        table = pa.table({"n": range(len(texts)), "text": texts})
        pq.write_table(table, path, row_group_size=7)
        pq.write_table(table[:0], folder / "empty.parquet")  # as other tools leave some
        return str(folder)
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


@pytest.mark.parametrize("kind", quick(TOKENIZERS, lambda kind: kind == "sentencepiece"))
@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "txt", "hf"])
def test_same_bytes_as_recorded(tmp_path: Path, form: str, kind: str) -> None:
    source = write_source(tmp_path / "a", form, LINES)
    expected, tokenizer = EXPECTED[kind], str(TOKENIZERS[kind])
    shared = prepare([source], tmp_path / "share", tokenizer=tokenizer, valid_share=0.2)
    assert digests(shared) == expected["share"]["files"] and shared["tokens"] == expected["share"]["tokens"]
    assert shared["tokenizer_sha256"] == expected["sha256"]
    limited = prepare([source], tmp_path / "tokens", tokenizer=tokenizer, valid_share=0.2, tokens=1500)
    assert expected["tokens"]["files"].items() <= digests(limited).items()
    if form != "hf":
        valid = write_source(tmp_path / "v", form, LINES[30:])
        apart = prepare([source], tmp_path / "valid", tokenizer=tokenizer, valid=[valid], valid_tokens=500)
        assert digests(apart) == expected["valid"]["files"]


def write_both(folder: Path, vocab_size: int) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    draw = torch.Generator().manual_seed(0)
    theirs = IndexedDatasetBuilder(f"{folder}/theirs.bin", dtype=DType.optimal_dtype(vocab_size))
    ours = PairWriter(folder / "ours", vocab_size)
    for length in (5, 0, 1, 300, 0):
        ids = torch.randint(vocab_size, (length,), generator=draw)
        theirs.add_document(ids, [length] if length else [])
        ours.add(ids)
    theirs.finalize(f"{folder}/theirs.idx")
    ours.close()


@pytest.mark.parametrize("vocab_size", [1000, 70_000])
@pytest.mark.megatron
def test_megatrons_builder_writes_the_same(tmp_path: Path, vocab_size: int) -> None:
    done = runs.forked(write_both, tmp_path, vocab_size, folder=tmp_path)
    assert done.status == 0, done.output
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"ours{ending}").read_bytes() == (tmp_path / f"theirs{ending}").read_bytes()
    assert read_index(tmp_path / "ours")[1:] == (3, 5, 306) and len(read_tokens(tmp_path / "ours")) == 306


def test_a_stopped_run_continues_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenized text is not tokenized again, and the number of workers changes nothing."""
    monkeypatch.setattr(prepare_data, "_GROUP_BYTES", 1)  # each file alone
    monkeypatch.setattr(tokens.shutil, "rmtree", lambda *_, **__: None)  # keep OUT/cache
    first = write_source(tmp_path / "a", "jsonl", LINES)
    second = tmp_path / "b.jsonl"
    second.write_bytes(b"".join(LINES[:20]) + b'{"text": \n')
    with pytest.raises(DataError, match=r"b\.jsonl: expected a text under the key 'text' .*got '{\"text\": '"):
        prepare([first, str(second)], tmp_path / "out", tokenizer=MODEL)
    done = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "cache").rglob("cache-*.arrow")}
    assert done
    second.write_bytes(b"".join(LINES[:20]))
    resumed = prepare([first, str(second)], tmp_path / "out", tokenizer=MODEL)
    assert all(path.stat().st_mtime_ns == before for path, before in done.items())
    fresh = prepare([first, str(second)], tmp_path / "fresh", tokenizer=MODEL, workers=3)
    assert digests(resumed) == digests(fresh) and resumed["documents"]["train"] == 60


def test_a_finished_set_is_not_made_again_and_no_other_one_takes_its_place(tmp_path: Path) -> None:
    source = write_source(tmp_path / "a", "jsonl", LINES)
    made = prepare([source], tmp_path / "out", tokenizer=MODEL)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["manifest.json", "train.bin", "train.idx"]
    before = (tmp_path / "out" / "train.bin").stat().st_mtime_ns
    assert prepare([source], tmp_path / "out", tokenizer=MODEL) == made
    assert (tmp_path / "out" / "train.bin").stat().st_mtime_ns == before
    with pytest.raises(DataError, match="a set of other settings or sources: give another --out"):
        prepare([source], tmp_path / "out", tokenizer=MODEL, tokens=100)
    (tmp_path / "out" / "train.bin").write_bytes(b"")
    with pytest.raises(DataError, match="is not the file that manifest"):
        prepare([source], tmp_path / "out", tokenizer=MODEL)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "train.idx").write_bytes(b"of weeks")
    with pytest.raises(DataError, match=r"train\.idx is there without a manifest\.json"):
        prepare([source], tmp_path / "own", tokenizer=MODEL)


def test_a_text_that_spells_end_of_text_is_text(tmp_path: Path) -> None:
    texts = ["a </s> b", "<s></s>", "c"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for kind, tokenizer in TOKENIZERS.items():
        made = prepare([str(tmp_path / "a.jsonl")], tmp_path / kind, tokenizer=str(tokenizer), valid_share=0)
        assert (read_tokens(tmp_path / kind / "train") == made["eos_id"]).sum() == 3


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.txt", "naïve".encode("utf-16"), r"a\.txt and 1 more cannot be read: UnicodeDecodeError"),
        ("a.jsonl", '{"text": "a"}\n'.encode("utf-16"), r"a\.jsonl cannot be read: UnicodeDecodeError"),
        ("a.jsonl", b'{"txt": "a"}\n', r"a\.jsonl: expected a text under the key 'text' .--key., got '{\"txt\": "),
        ("a.jsonl", b'["text"]\n', "expected a text under"),
        ("a.jsonl", b'{"text": "ok"}\n\n{"text": "\\ud800"}\n', "expected a text under .*UnicodeEncodeError"),
        ("b.jsonl.zst", zstandard.compress(b'{"txt": "a"}\n'), "expected a text under"),
        ("a.jsonl.zst", zstandard.compress(b'{"text": "a"}\n' * 99)[:-3], "a.jsonl.zst ends in the middle of a frame"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "abc"}\n' * 100, mtime=0)[:40], "cannot be read: EOFError"),
    ],
)
def test_what_is_no_text_is_refused_in_one_sentence(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / "b.txt").write_text("good")
    out = tmp_path.with_name(f"{tmp_path.name}-out")
    with pytest.raises(DataError, match=sentence):
        prepare([str(tmp_path)], out, tokenizer=MODEL)
    assert [path.name for path in out.iterdir()] == ["cache"]


def test_one_process_prepares_a_set(tmp_path: Path) -> None:
    (tmp_path / "out/cache").mkdir(parents=True)
    with FileLock(tmp_path / "out/cache/lock"), pytest.raises(DataError, match="another process prepares"):
        prepare([str(FIXTURES)], tmp_path / "out", tokenizer=MODEL)


def test_the_files_of_a_folder(tmp_path: Path) -> None:
    """Sorted; links to folders, hidden files, plain .json and what --valid has are passed over."""
    for name in ("b/x.txt", "a.txt", "*.txt", ".hidden.txt", "facts.json", "b/.git/y.txt", "c.png"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    (tmp_path / "in" / "again").symlink_to(tmp_path / "in")
    found = prepare_data.find_groups([str(tmp_path / "in")], "text", "train")
    names = [Path(name).name for group in found for name in group.files]
    assert names == ["*.txt", "a.txt", "x.txt"]
    first = str(tmp_path / "in" / "a.txt")
    made = prepare([str(tmp_path / "in"), first], tmp_path / "out", tokenizer=MODEL, valid=[first])
    assert made["documents"] == {"train": 2, "valid": 1}
    with pytest.raises(DataError, match="there is no text for training"):
        prepare([first], tmp_path / "o", tokenizer=MODEL, valid=[first])


def test_a_trained_tokenizer_is_the_same_again(tmp_path: Path) -> None:
    source = write_source(tmp_path / "a", "jsonl", LINES)
    made = [prepare([source], tmp_path / out, train_tokenizer=320) for out in ("one", "two")]
    assert digests(made[0]) == digests(made[1]) and made[0]["vocab_size"] == 320
    assert prepare([source], tmp_path / "one", train_tokenizer=320) == made[0]
    with pytest.raises(DataError, match=" cannot be loaded as a tokenizer"):  # of an empty shell variable
        prepare([source], tmp_path / "none", tokenizer="")
    assert load_tokenizer(str(tmp_path / "one" / "tokenizer.model")).sha256 == made[0]["tokenizer_sha256"]


def test_the_command_says_what_it_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_source(tmp_path / "a", "jsonl", LINES)
    words = ["data", "prepare", source, "--out", str(tmp_path / "out"), "--tokenizer", MODEL, "--valid-share", "0"]
    assert cli.main([*words, "--workers", "1", "--tokens", "1M"]) == 0
    assert "train: 3,404 tokens, 40 documents" in (said := capsys.readouterr().out) and "--valid-data" not in said
    assert cli.main([*words[:4], str(tmp_path / "few"), *words[5:7], "--workers", "1"]) == 0
    assert "valid: 0 tokens, 0 documents, so train with --valid-data of another set" in capsys.readouterr().out
