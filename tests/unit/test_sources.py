# SPDX-License-Identifier: Apache-2.0
"""Sources as they lie on disks: links, compressed files of other tools, identities, and the sample of a tokenizer."""

from __future__ import annotations

import gzip
import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from simreg_megatron.data import DataError, commands, sample
from simreg_megatron.data.compressed import decompressed
from simreg_megatron.data.sources import find_inputs
from simreg_megatron.data.tokenizer import train_tokenizer
from tests.helpers.preparation import BLOCK, TEXTS, lines


def read(path: Path) -> bytes:
    return b"".join(piece for piece, _ in decompressed(path))


def records(*paths: Path) -> list[Any]:
    blocks = [block for one in find_inputs(list(map(str, paths))) for block in one.blocks(BLOCK, lambda _: True)]
    return [record for block in blocks for record in block.records("text")]


# --- Folders and files -----------------------------------------------------------------------------


def test_links_that_lead_to_each_other_end(tmp_path: Path) -> None:
    for name, other in (("one", "two"), ("two", "one")):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text(name)
        (tmp_path / name / "other").symlink_to(tmp_path / other)
    (found,) = find_inputs([str(tmp_path / "one")])
    assert found.names == ("one.txt", "other/two.txt")


def test_a_folder_of_two_names_is_read_by_both(tmp_path: Path) -> None:
    """Only what leads back is left out: a link beside its target is somebody's wish."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "a.txt").write_text("text")
    (tmp_path / "b").symlink_to("a")
    (found,) = find_inputs([str(tmp_path)])
    assert found.names == ("a/a.txt", "b/a.txt")


def test_one_file_that_is_none_looks_at_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "table.csv").write_text("text")
    (tmp_path / "facts.json").write_text("{}")
    monkeypatch.setattr(Path, "rglob", lambda *_: pytest.fail("its folder may hold millions of files"))
    with pytest.raises(DataError, match=r"table.csv holds nothing that can be read: give .*, or c4$"):
        find_inputs([str(tmp_path / "table.csv")])


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
@pytest.mark.parametrize("place", [0, -1])
def test_another_file_of_the_same_name_and_size_is_another(tmp_path: Path, name: str, place: int) -> None:
    data = bytearray(lines(TEXTS) * 4)
    (tmp_path / name).write_bytes(data)
    (before,) = find_inputs([str(tmp_path / name)])
    assert len(data) > 3 << 16 and before.identity() == find_inputs([str(tmp_path / name)])[0].identity()
    first = before.identity()
    data[place] ^= 1
    (tmp_path / name).write_bytes(data)
    assert before.identity() != first and before.identity()["bytes"] == first["bytes"]


def test_many_files_of_text_are_told_by_some(tmp_path: Path) -> None:
    for number in range(500):
        (tmp_path / f"{number:03d}.txt").write_text("text")
    (found,) = find_inputs([str(tmp_path)])
    before = found.identity()
    (tmp_path / "000.txt").write_text("TEXT")
    assert found.identity() != before


# --- Compressed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [1, 255, 256, 5000])
def test_zeros_behind_a_gzip_file_are_padding(tmp_path: Path, padding: int) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"one\n") + bytes(padding) + gzip.compress(b"two\n") + bytes(padding))
    assert read(path) == b"one\ntwo\n"
    path.write_bytes(gzip.compress(b"one\n") + bytes(padding) + b"garbage")
    with pytest.raises(DataError, match="is damaged near byte"):
        read(path)
    path.write_bytes(bytes(padding))
    with pytest.raises(DataError, match=r"is damaged near byte|ends too early"):
        read(path)


def test_a_long_window_of_zstandard(tmp_path: Path) -> None:
    import zstandard

    parameters = zstandard.ZstdCompressionParameters(window_log=29, enable_ldm=True)
    squeezer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "a.jsonl.zst").write_bytes(squeezer.compress(lines(TEXTS)) + squeezer.flush())  # its size is not told
    assert read(tmp_path / "a.jsonl.zst") == lines(TEXTS)


# --- Parquet ---------------------------------------------------------------------------------------


def test_one_value_that_is_no_utf_8_is_one_broken_record(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    values = pyarrow.array([b"good", b"caf\xe9", None, "\u6771".encode()], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": values}), tmp_path / "a.parquet")
    found = records(tmp_path / "a.parquet")
    assert [one.text for one in found] == ["good", "caf\udce9", "", "\u6771"]
    assert "NoneType" in found[2].problem


@pytest.mark.parametrize("library", ["pyarrow", "pyarrow.parquet"])
def test_a_missing_pyarrow_is_told(tmp_path: Path, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(DataError, match=r"a.parquet needs the pyarrow library: pip install pyarrow"):
        records(tmp_path / "a.parquet")


# --- The sample of a tokenizer ---------------------------------------------------------------------


def test_a_missing_sentencepiece_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(DataError, match="sentencepiece is needed to train a tokenizer: pip install sentencepiece"):
        train_tokenizer(["text"], tmp_path / "a.model", vocab_size=300)


@pytest.mark.parametrize("text", ["word " * 3000, "\u6771\u4eac" * 5000, "x" * 8191 + " " + "y" * 9000, "caf\udce9"])
def test_long_lines_are_cut_and_whole(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": f"short\n{text}"}))
    (found,) = sample.sample_texts(find_inputs([str(tmp_path)]), "text")
    pieces = found.splitlines()
    assert pieces[0] == "short" and max(len(piece.encode()) for piece in pieces) <= 4000
    good = text.encode("utf-8", "ignore").decode()
    assert "".join(pieces[1:]).replace(" ", "") == good.replace(" ", "")
    assert " " not in text or "".join(pieces[1:]).count(" ") >= text.count(" ") - len(pieces)


def test_long_lines_teach_the_tokenizer(tmp_path: Path) -> None:
    from sentencepiece import SentencePieceProcessor

    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "extraordinary " * 1000}) + "\n" + json.dumps({"text": "an"}))
    texts = list(sample.sample_texts(find_inputs([str(tmp_path)]), "text"))
    train_tokenizer(texts, tmp_path / "a.model", vocab_size=282)
    model = SentencePieceProcessor(model_file=str(tmp_path / "a.model"))
    assert len(model.encode("extraordinary")) < 4


def sampled(folder: Path, monkeypatch: pytest.MonkeyPatch, *, characters: int) -> list[int]:
    """Which of 1000 documents in one compressed file are taken."""
    monkeypatch.setattr(sample, "_BLOCK", 1 << 12)
    monkeypatch.setattr(sample, "_CHARACTERS", characters)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines(NUMBERED)))
    return [int(text[:4]) for text in sample.sample_texts(find_inputs([str(folder)]), "text")]


NUMBERED = [f"{number:04d} " + "x" * 95 for number in range(1000)]


def test_a_compressed_file_is_sampled_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = sampled(tmp_path, monkeypatch, characters=4000)
    assert 20 <= len(found) <= 40 and found[0] == 0 and found[-1] > 900
    assert len({later - one for one, later in pairwise(found)}) == 1
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(NUMBERED[:30])))
    assert len(list(sample.sample_texts(find_inputs([str(tmp_path)]), "text"))) == 30, "a short one is taken whole"


def test_a_stream_is_not_read_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = sampled(tmp_path, monkeypatch, characters=200)
    assert 64 <= found[-1] + 1 <= 200 and len(found) <= 2


# --- The command -----------------------------------------------------------------------------------


def ask(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(commands.app, list(map(str, words)))
    return done.exit_code, done.stdout + done.stderr


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "texts").mkdir()
    for number in range(3):
        (tmp_path / "texts" / f"{number}.jsonl").write_bytes(lines(TEXTS[number * 90 : number * 90 + 90]))
    words = ("prepare", tmp_path / "texts", "--out", tmp_path / "out", "--train-tokenizer", 350, "--workers", 1)
    monkeypatch.setattr("simreg_megatron.data.prepare.prepare", lambda *_: None)
    status, told = ask(*words)
    assert status == 0 and "> training a tokenizer of 350 pieces" in told
    status, told = ask(*words)
    assert status == 0 and "tokenizer.model, which was trained on these sources before" in told
    return tmp_path


def again(place: Path, *words: object) -> tuple[int, str]:
    out = ("--out", place / "out", "--workers", 1)
    return ask("prepare", *(words or (place / "texts", "--train-tokenizer", 350)), *out)


def test_a_tokenizer_is_used_again_only_by_the_same_command(trained: Path) -> None:
    (trained / "more.jsonl").write_bytes(lines(["more"]))
    for words, why in (
        ((trained / "texts", "--train-tokenizer", 351), "other vocab_size, 350: remove it, or use it by --tokenizer"),
        ((trained / "texts", "--train-tokenizer", 350, "--key", "id"), "other key, text"),
        ((trained / "texts", trained / "more.jsonl", "--train-tokenizer", 350), "other sources: remove it"),
    ):
        status, told = again(trained, *words)
        assert status == 2 and f"tokenizer.model is there, and it was trained with {why}" in told, told


def test_a_mended_source_keeps_the_tokenizer(trained: Path) -> None:
    with (trained / "texts" / "1.jsonl").open("ab") as stream:
        stream.write(lines(["mended"]))
    assert again(trained)[0] == 0


def test_a_tokenizer_of_another_is_refused(trained: Path) -> None:
    (trained / "out" / "tokenizer.model").write_bytes((trained / "out" / "tokenizer.model").read_bytes() + b"\0")
    status, told = again(trained)
    assert status == 2 and "nothing tells on what it was trained: remove it, or use it by --tokenizer" in told
    (trained / "out" / "tokenizer.model.made.json").unlink()
    assert again(trained)[0] == 2


def test_killed_between_the_record_and_the_model(trained: Path) -> None:
    os.remove(trained / "out" / "tokenizer.model")
    status, told = again(trained)
    assert status == 0 and "> training" in told


def test_a_wrong_word_is_told_before_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS))
    monkeypatch.setattr("simreg_megatron.data.trained.train_tokenizer", lambda *_, **__: pytest.fail("minutes"))
    for words, why in ((("--bos", "always"), "--bos takes"), (("--valid-share", 2), "--valid-share takes a share")):
        status, told = again(tmp_path, tmp_path / "a.jsonl", "--train-tokenizer", 350, *words)
        assert status == 2 and why in told


def test_the_validation_text_teaches_no_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "texts").mkdir()
    for name in ("a", "valid"):
        (tmp_path / "texts" / f"{name}.jsonl").write_bytes(lines([name]))
    seen: list[str] = []
    monkeypatch.setattr("simreg_megatron.data.trained.train_tokenizer", lambda texts, *_, **__: seen.extend(texts))
    again(tmp_path, tmp_path / "texts", "--valid", tmp_path / "texts" / "valid.jsonl", "--train-tokenizer", 350)
    assert seen == ["a"]


@pytest.mark.parametrize(
    ("text", "number"),
    [("20B", 20 * 10**9), ("1.5b", 15 * 10**8), ("1,000,000", 10**6), ("12,500K", 12_500_000), ("1_000", 1000)],
)
def test_numbers(text: str, number: int) -> None:
    assert commands._number(text, "tokens") == number


@pytest.mark.parametrize("text", ["1,5B", "1,00", "1,0000", ",100", "1,000.5", "1.", "1,000,00", "_", "1.5.5"])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(DataError, match="--tokens takes a number such as 20B"):
        commands._number(text, "tokens")


@pytest.mark.parametrize("size", ["0", "32", "63K"])
def test_parts_of_no_size_are_refused(tmp_path: Path, size: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS))
    words = (tmp_path / "a.jsonl", "--tokenizer", "x.model", "--block-size", size)
    assert f"--block-size takes 64K or more, not '{size}'" in again(tmp_path, *words)[1]
