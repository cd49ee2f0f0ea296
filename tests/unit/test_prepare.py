# SPDX-License-Identifier: Apache-2.0
"""`data prepare`: Megatron's bytes from every kind of source, whoever works and whoever is killed."""

from __future__ import annotations

import errno
import gzip
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from simreg_megatron.data import DataError, check_dataset, encoding, prepare, sample
from simreg_megatron.data.blocks import LinesBlock
from simreg_megatron.data.commands import app
from simreg_megatron.data.encoding import Encoder, describe_tokenizer
from simreg_megatron.data.prepare import Task, merge
from simreg_megatron.data.sources import find_inputs
from simreg_megatron.data.tokenizer import train_tokenizer
from simreg_megatron.installed import python_path
from simreg_megatron.tools.export_tokenizer import open_tokenizer
from simreg_megatron.tools.safe_load import CheckpointError
from tests.helpers import jobs, megatrons_tool
from tests.helpers.preparation import BLOCK, NUM_TEXTS, TEXTS, content, lines, make, train_hugging_face

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    train_tokenizer(TEXTS, path, vocab_size=400)
    return path


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer that opens each text with <s>, as LLaMA's does, and would cut texts at 8 tokens."""
    return train_hugging_face(tmp_path_factory.mktemp("hugging") / "face")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All texts, in the order of the files' names, in every form; and files that are no text."""
    import pyarrow
    import pyarrow.parquet
    import zstandard

    root = tmp_path_factory.mktemp("text")
    (root / "a.jsonl").write_bytes(lines(TEXTS[:100]).rstrip(b"\n"))  # the last line may have no end
    compressed = lines(TEXTS[100:150]), lines(TEXTS[150:200])
    (root / "b.jsonl.gz").write_bytes(b"".join(map(gzip.compress, compressed)))  # two members, as from `cat`
    (root / "c.json.zst").write_bytes(zstandard.ZstdCompressor().compress(lines(TEXTS[200:260])))
    table = pyarrow.table({"id": range(40), "text": TEXTS[260:300]})
    pyarrow.parquet.write_table(table, root / "d.parquet", row_group_size=15)
    (root / "e" / "deep").mkdir(parents=True)
    for index in range(300, NUM_TEXTS):
        (root / "e" / ("deep" if index < 310 else "") / f"{index}.txt").write_text(TEXTS[index], encoding="utf-8")
    (root / "dataset_info.json").write_text("{}")
    (root / "README.md").write_text("not a text to train on")
    return root


ORDER = [*range(300), *range(310, NUM_TEXTS), *range(300, 310)]  # e/310.txt stands before e/deep


class Here:
    """Instead of a pool: the work is done where it is submitted, so that a test can interfere."""

    def __init__(self, *_: Any, initializer: Any, initargs: Any, **__: Any) -> None:
        initializer(*initargs)

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None: ...

    def shutdown(self, **_: Any) -> None: ...

    def submit(self, function: Any, *arguments: Any) -> Future:
        future: Future = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "ProcessPoolExecutor", Here)
    monkeypatch.setattr("simreg_megatron.data.work.ctypes.CDLL", lambda _: type("C", (), {"prctl": lambda *_: 0}))
    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(signal, "signal", lambda *_: handler)


@pytest.fixture(scope="module")
def whole(folder: Path, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The set that every detour must end with: made by one worker, in a pool."""
    output = tmp_path_factory.mktemp("whole")
    make(output, folder, tokenizer=tokenizer, valid_share=0.1)
    return output


def megatron_pair(prefix: Path, documents: list[list[int]], eos: int, vocab_size: int) -> tuple[bytes, bytes]:
    """What Megatron's tools/preprocess_data.py writes of these ids, through the builder it uses."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(vocab_size))
    for ids in documents:
        ended = [*ids, eos] if ids else []
        builder.add_document(ended, [len(ended)] if ended else [])
    builder.finalize(f"{prefix}.idx")
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


@pytest.mark.megatron
def test_sentencepiece_gives_megatrons_bytes(folder: Path, tokenizer: Path, tmp_path: Path, here: None) -> None:
    from sentencepiece import SentencePieceProcessor

    model = SentencePieceProcessor(model_file=str(tokenizer))
    make(tmp_path / "ours", folder, tokenizer=tokenizer)
    for order, equal in ((ORDER, True), (range(NUM_TEXTS), False)):
        ids = [model.encode_as_ids(TEXTS[index]) for index in order]
        expected = megatron_pair(tmp_path / "megatron", ids, model.eos_id(), model.vocab_size())
        ours = tuple((tmp_path / "ours" / f"train{ending}").read_bytes() for ending in (".bin", ".idx"))
        assert (ours == expected) is equal


def test_the_name_of_a_special_token_is_text_where_the_tokenizer_says_so(hugging_face: Path, tmp_path: Path) -> None:
    """The JSON that workers load does not say it, and an end in the middle of a document would be a real one."""
    from transformers import AutoTokenizer

    model = AutoTokenizer.from_pretrained(hugging_face)
    texts = [f"before{model.eos_token}after"]
    found = []
    for splits in (False, True):
        model = AutoTokenizer.from_pretrained(hugging_face, split_special_tokens=splits)
        model.save_pretrained(folder := tmp_path / str(splits))
        encoded = Encoder(describe_tokenizer(str(folder))).encode(texts)
        assert encoded == model(texts, add_special_tokens=False).input_ids
        found.append(model.eos_token_id in encoded[0])
    assert found == [True, False]


@pytest.mark.megatron
@pytest.mark.parametrize("bos", ["none", "document"])
def test_hugging_face_gives_megatrons_bytes(
    folder: Path, hugging_face: Path, tmp_path: Path, here: None, bos: str
) -> None:
    """With --bos document as Megatron's tool by default; none is its --tokenizer-hf-no-include-special-tokens."""
    from transformers import AutoTokenizer

    model = AutoTokenizer.from_pretrained(hugging_face)
    manifest = make(tmp_path / "ours", folder, tokenizer=hugging_face, bos=bos)
    assert manifest is not None and manifest["settings"]["bos"] == bos and manifest["bos_id"] == 0
    ids = [model(TEXTS[index], add_special_tokens=bos == "document").input_ids for index in ORDER]
    assert max(map(len, ids)) > 8, "a tokenizer's own truncation is not for pretraining"
    expected = megatron_pair(tmp_path / "megatron", ids, model.eos_token_id, len(model))
    assert tuple((tmp_path / "ours" / f"train{ending}").read_bytes() for ending in (".bin", ".idx")) == expected
    assert manifest["tokens"]["train"] == sum(len(one) + 1 for one in ids if one)


@pytest.mark.megatron
def test_a_tokenizer_that_ends_no_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = SimpleNamespace(eos_token_id=None, sep_token_id=None)
    monkeypatch.setattr(encoding, "load_hugging_face", lambda source: tokenizer)
    with pytest.raises(DataError, match="the tokenizer some/folder has no end-of-text token: name its eos_token in"):
        describe_tokenizer("some/folder")


@pytest.mark.parametrize("vocab_size", [65499, 65500])
def test_the_number_type_follows_megatrons_rule(tmp_path: Path, vocab_size: int) -> None:
    from simreg_megatron.data.indexed import PairWriter, token_dtype

    documents = [[1, 2, 65000], [], [4]]
    expected = megatron_pair(tmp_path / "megatron", documents, 3, vocab_size)
    writer = PairWriter(tmp_path / "ours", token_dtype(vocab_size))
    writer.append(np.array([1, 2, 65000, 3]), np.array([4, 0]))
    writer.append(np.array([4, 3]), np.array([2]))
    writer.commit()
    assert ((tmp_path / "ours.bin").read_bytes(), (tmp_path / "ours.idx").read_bytes()) == expected


def ours(kind: str, tokenizer: Path, texts: list[str], folder: Path) -> dict[str, bytes]:
    source = folder / "ours.jsonl"
    source.write_bytes(lines(texts))
    make(folder / "ours", source, tokenizer=tokenizer, bos=megatrons_tool.KINDS[kind][1])
    return {ending: (folder / "ours" / f"train{ending}").read_bytes() for ending in megatrons_tool.ENDINGS}


@pytest.mark.parametrize("kind", megatrons_tool.KINDS)
def test_megatrons_own_tool_wrote_the_same(tmp_path: Path, here: None, kind: str) -> None:
    """Its files are remembered by their checksums; the file that holds them says what made them, and when."""
    remembered = json.loads(megatrons_tool.REMEMBERED.read_text())["sha256"]
    tokenizer, texts = megatrons_tool.make_tokenizer(kind, tmp_path), megatrons_tool.TEXTS_REMEMBERED
    assert megatrons_tool.checksums(ours(kind, tokenizer, texts, tmp_path)) == remembered[kind]
    (tmp_path / "other").mkdir()
    other = megatrons_tool.checksums(ours(kind, tokenizer, [*texts[:-1], texts[-1] + "."], tmp_path / "other"))
    assert all(other[ending] != remembered[kind][ending] for ending in megatrons_tool.ENDINGS)


@pytest.mark.megatron
@pytest.mark.skipif(not os.environ.get("MEGATRON_PATH"), reason="MEGATRON_PATH names no Megatron-LM source tree")
@pytest.mark.parametrize("kind", megatrons_tool.KINDS)
def test_megatrons_own_tool_writes_the_same(
    tokenizer: Path, hugging_face: Path, tmp_path: Path, here: None, kind: str
) -> None:
    tree, model = Path(os.environ["MEGATRON_PATH"]).absolute(), tokenizer if kind == "sentencepiece" else hugging_face
    assert ours(kind, model, TEXTS, tmp_path) == megatrons_tool.written_by(tree, kind, model, TEXTS, tmp_path)


def test_three_workers_write_what_one_writes(folder: Path, tokenizer: Path, whole: Path, tmp_path: Path) -> None:
    make(tmp_path, folder, tokenizer=tokenizer, valid_share=0.1, workers=3)
    assert content(tmp_path) == content(whole)
    assert not (tmp_path / "parts").exists()


def test_the_manifest_tells_what_is_there(folder: Path, tokenizer: Path, whole: Path) -> None:
    import hashlib

    manifest = json.loads((whole / "manifest.json").read_text())
    assert sum(manifest["documents"].values()) == NUM_TEXTS
    assert manifest["read"]["empty"] == TEXTS.count("") and manifest["read"]["skipped"] == 0
    for name, file in manifest["files"].items():
        data = (whole / name).read_bytes()
        assert file == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert manifest["tokens"]["train"] * 2 == manifest["files"]["train.bin"]["bytes"] and manifest["dtype"] == "uint16"
    names = [one["name"] for one in manifest["settings"]["train_sources"]]
    assert names == ["a.jsonl", "b.jsonl.gz", "c.json.zst", "d.parquet", "e/310.txt to e/deep/309.txt"]
    assert check_dataset(whole / "train", tokenizer=tokenizer) == []


def test_the_sides_share_no_text(folder: Path, tokenizer: Path, whole: Path) -> None:
    from sentencepiece import SentencePieceProcessor

    model = SentencePieceProcessor(model_file=str(tokenizer))
    found = {}
    for side in ("train", "valid"):
        ids = np.fromfile(whole / f"{side}.bin", dtype=np.uint16).tolist()
        ends = [index for index, token in enumerate(ids) if token == model.eos_id()]
        starts = [0, *(end + 1 for end in ends)]
        found[side] = {model.decode(ids[a:b]) for a, b in zip(starts, ends, strict=False)}
    assert found["train"].isdisjoint(found["valid"])
    assert found["train"] | found["valid"] == set(TEXTS) - {""}
    assert 0.04 < len(found["valid"]) / NUM_TEXTS < 0.2


@pytest.mark.parametrize("tokens", [None, 3000, 9000])
def test_shards_and_merge_make_the_whole(
    folder: Path, tokenizer: Path, tmp_path: Path, here: None, tokens: int | None
) -> None:
    """Also where a budget ends the text early, which no shard can see alone."""
    settings = {"tokenizer": tokenizer, "valid_share": 0.1, "tokens": tokens}
    make(tmp_path / "whole", folder, **settings)
    for index in (2, 0):
        assert make(tmp_path / "merged", folder, **settings, shard=(index, 3)) is None
    if tokens is None:
        with pytest.raises(DataError, match="run the shard that makes it again"):
            merge(tmp_path / "merged")
    make(tmp_path / "merged", folder, **settings, shard=(1, 3))
    merge(tmp_path / "merged")
    assert content(tmp_path / "merged") == content(tmp_path / "whole")


def test_a_budget_for_one_side_leaves_the_other_sides(
    folder: Path, tokenizer: Path, tmp_path: Path, here: None
) -> None:
    settings = {"tokenizer": tokenizer, "valid_sources": [str(folder / "d.parquet")], "valid_tokens": 300}
    make(tmp_path / "whole", folder / "a.jsonl", **settings, tokens=2000)
    for index in (0, 1):
        make(tmp_path / "merged", folder / "a.jsonl", **settings, tokens=3000, shard=(index, 2))
    manifest = merge(tmp_path / "merged", {"train": 2000, "valid": None})
    assert manifest["budget"] == {"train": 2000, "valid": 300}
    assert content(tmp_path / "merged")["valid.bin"] == content(tmp_path / "whole")["valid.bin"]
    assert content(tmp_path / "merged")["train.bin"] == content(tmp_path / "whole")["train.bin"]


def test_a_link_back_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "text" / "deep").mkdir(parents=True)
    (tmp_path / "text" / "a.txt").write_text("once")
    (tmp_path / "text" / "deep" / "up").symlink_to(tmp_path / "text")
    (tmp_path / "text" / "itself").symlink_to(".")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.txt").write_text("a link to another place is")
    (tmp_path / "text" / "other").symlink_to(tmp_path / "elsewhere")
    (found,) = find_inputs([str(tmp_path / "text")])
    assert found.names == ("a.txt", "other/b.txt")


def test_a_local_folder_named_c4_is_a_folder(folder: Path, tokenizer: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """And not its own validation set."""
    (tmp_path / "c4").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    words = ["prepare", "c4", "--out", "out", "--tokenizer", str(tokenizer)]
    seen: list[Task] = []
    monkeypatch.setattr(prepare, "prepare", lambda task, progress: seen.append(task))
    assert CliRunner().invoke(app, words).exit_code == 0
    assert seen[0].valid_sources == () and seen[0].valid_share == 0.005


def test_a_mark_of_the_byte_order_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one", encoding="utf-8-sig")
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n', encoding="utf-8-sig")
    blocks = [block for one in find_inputs([str(tmp_path)]) for block in one.blocks(BLOCK, lambda _: True)]
    assert [record.text for block in blocks for record in block.records("text")] == ["one", "two"]


@pytest.mark.parametrize("kind", ["parquet", "txt"])
def test_a_sample_is_drawn_from_the_whole_length(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups and files of text are blocks of their own size, smaller or larger than was asked for."""
    import pyarrow
    import pyarrow.parquet

    monkeypatch.setattr(sample, "_BLOCK", 1 << 12)
    monkeypatch.setattr(sample, "_CHARACTERS", 4000)
    texts = [f"{number:04d} " + "x" * (20 if kind == "parquet" else 9000) for number in range(400)]
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet", row_group_size=1)
    else:
        for text in texts:
            (tmp_path / f"{text[:4]}.txt").write_text(text)
    found = [int(text[:4]) for text in sample.sample_texts(find_inputs([str(tmp_path)]), "text")]
    assert len(found) > 30 and found[0] == 0 and found[-1] > 380


def test_the_budget_ends_with_a_whole_document(folder: Path, tokenizer: Path, tmp_path: Path, here: None) -> None:
    every = make(tmp_path / "all", folder, tokenizer=tokenizer)
    some = make(tmp_path / "some", folder, tokenizer=tokenizer, tokens=5000)
    assert every is not None and some is not None
    assert 5000 <= some["tokens"]["train"] < 5400 < every["tokens"]["train"]
    data = (tmp_path / "some" / "train.bin").read_bytes()
    assert (tmp_path / "all" / "train.bin").read_bytes().startswith(data)
    assert np.frombuffer(data, dtype=np.uint16)[-1] == every["eos_id"]


def test_validation_text_of_its_own(folder: Path, tokenizer: Path, tmp_path: Path, here: None) -> None:
    manifest = make(
        tmp_path / "out",
        folder / "a.jsonl",
        tokenizer=tokenizer,
        valid_sources=[str(folder / "d.parquet")],
        valid_tokens=300,
    )
    make(tmp_path / "alone", folder / "d.parquet", tokenizer=tokenizer, tokens=300)
    assert manifest is not None and manifest["documents"]["train"] == 100
    for ending in (".bin", ".idx"):
        valid = (tmp_path / "out" / f"valid{ending}").read_bytes()
        assert valid == (tmp_path / "alone" / f"train{ending}").read_bytes()


def test_the_hub_is_streamed(folder: Path, tokenizer: Path, tmp_path: Path, here: None) -> None:
    """A folder stands for the Hub: `datasets` reads both by the same code, and this one without a network."""
    hub = tmp_path / "hub"
    hub.mkdir()
    for number in range(2):
        (hub / f"train-{number}.jsonl").write_bytes(lines(TEXTS[number * 50 : number * 50 + 50]))
    manifest = prepare.prepare(Task([f"hf:{hub}"], tmp_path / "out", str(tokenizer), block_bytes=BLOCK))
    make(tmp_path / "files", folder / "a.jsonl", tokenizer=tokenizer)
    assert manifest is not None and manifest["documents"]["train"] == 100
    assert (tmp_path / "out" / "train.bin").read_bytes() == (tmp_path / "files" / "train.bin").read_bytes()


def test_the_hub_is_read_at_one_commit(
    tokenizer: Path, tmp_path: Path, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Hub's newest commit is found once; a later command is refused unless it names the one of the first."""
    import datasets

    hub, asked, newest = tmp_path / "hub", [], ["a" * 40]
    hub.mkdir()
    for number in range(2):
        (hub / f"train-{number}.jsonl").write_bytes(lines(TEXTS[number * 50 : number * 50 + 50]))
    build = datasets.load_dataset_builder

    def at(name: str, *rest: Any, revision: str | None = None) -> Any:
        asked.append(revision)
        builder = build(name, *rest)
        builder.hash = revision or newest[0]
        return builder

    monkeypatch.setattr(datasets, "load_dataset_builder", at)
    task = Task([f"hf:{hub}"], tmp_path / "out", str(tokenizer), block_bytes=BLOCK)
    manifest = prepare.prepare(task)
    assert manifest is not None
    assert {one["revision"] for one in manifest["settings"]["train_sources"]} == {"a" * 40}
    assert asked == [None, *["a" * 40] * (len(asked) - 1)] and len(asked) > 1
    newest[0] = "b" * 40
    with pytest.raises(DataError, match=f'"revision": "{"a" * 40}"}} then'):
        prepare.prepare(task)
    again = prepare.prepare(replace(task, sources=[f"hf:{hub}@{'a' * 40}"]))
    assert again == manifest


# --- Stopped at any moment -------------------------------------------------------------------------


def _die_at(call: int, output: Path, folder: Path, tokenizer: Path) -> None:
    """Kill this process at its n-th rename: each is a moment where a file comes into being."""
    replace, calls = Path.replace, [0]

    def counted(path: Path, target: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(path, target)

    Path.replace = counted  # type: ignore[assignment,method-assign]
    make(output, folder, tokenizer=tokenizer, valid_share=0.1)


def test_killed_at_every_rename(folder: Path, tokenizer: Path, whole: Path, tmp_path: Path, here: None) -> None:
    """The first run dies at its 1st, the next at its 2nd: so all the moments are met, those of the end too."""
    fork, deaths = multiprocessing.get_context("fork"), 0
    while True:
        process = fork.Process(target=_die_at, args=(deaths % 7 + 1, tmp_path, folder, tokenizer))
        process.start()
        process.join(60)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL and deaths < 80
        deaths += 1
    assert deaths > 10
    assert content(tmp_path) == content(whole)


LATE = """
import time
from pathlib import Path
replace = Path.replace
Path.replace = lambda *given: (time.sleep(0.1), replace(*given))[1]
"""
"""So that a kill finds the work under way, however late it comes."""


def test_killed_at_random_moments(
    folder: Path, tokenizer: Path, whole: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """kill -9 of the program alone: its workers must go with it, and the last run ends with the same bytes."""
    task = Task([str(folder)], tmp_path, str(tokenizer), valid_share=0.1, workers=2, block_bytes=BLOCK)
    program = (
        f"from pathlib import PosixPath\nfrom simreg_megatron.data.prepare import Task, prepare\nprepare({task!r})"
    )
    command = [sys.executable, "-c", program]
    random, quiet = np.random.default_rng(7), subprocess.DEVNULL
    late = tmp_path_factory.mktemp("late")
    (late / "sitecustomize.py").write_text(LATE)  # which the workers, too, find at their start
    environ = {**os.environ, "PYTHONPATH": python_path(late)}
    seen = set()
    for _ in range(3):
        with jobs.started(command, cwd=ROOT, env=environ, stdout=quiet, stderr=quiet) as process:
            wanted = len(seen) and len(list(tmp_path.glob("parts/*/*/*.npz"))) + int(random.integers(1, 6))
            while process.poll() is None:
                if len(list(tmp_path.glob("parts/*/*/*.npz"))) >= max(wanted, 1):
                    break
                time.sleep(0.002)
            process.kill()
            process.wait()
            deadline = time.monotonic() + 60
            while (left := process.left()) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert not left, "workers outlived the command"
        seen.add(len(list(tmp_path.glob("parts/*/*/*.npz"))))
    assert len(seen) > 1, "no kill found the work under way"
    done = jobs.run(command, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert content(tmp_path) == content(whole)


def _with_small_files(output: Path, folder: Path, tokenizer: Path, answers: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        make(output, folder, tokenizer=tokenizer, valid_share=0.1)
        answers.put("no error")
    except DataError as error:
        answers.put(str(error))


def test_no_room_for_the_set(folder: Path, tokenizer: Path, whole: Path, tmp_path: Path, here: None) -> None:
    """The parts fit under the limit and the set does not."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    process = context.Process(target=_with_small_files, args=(tmp_path, folder, tokenizer, answers))
    process.start()
    told = answers.get(timeout=60)
    process.join()
    assert "no more can be written" in told and "same command" in told and "\n" not in told
    assert not list(tmp_path.glob("*.bin*")), "an unfinished file was left"
    made = {path: path.stat().st_mtime_ns for path in tmp_path.glob("parts/*/*/*.npz")}
    assert len(made) > 5
    make(tmp_path, folder, tokenizer=tokenizer, valid_share=0.1)
    assert content(tmp_path) == content(whole)


@pytest.mark.parametrize("good", [0, 3, 8])
def test_the_disk_fills_up(
    folder: Path, tokenizer: Path, whole: Path, tmp_path: Path, here: None, good: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    savez, calls = np.savez, [0]

    def filled(stream: Any, **arrays: Any) -> None:
        calls[0] += 1
        if calls[0] > good:
            stream.write(b"half of a part")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        savez(stream, **arrays)

    with monkeypatch.context() as full:
        full.setattr(np, "savez", filled)
        with pytest.raises(DataError, match=r"No space left on device.*free some space"):
            make(tmp_path, folder, tokenizer=tokenizer, valid_share=0.1)
    assert len(list(tmp_path.glob("parts/*/*/*"))) == good
    make(tmp_path, folder, tokenizer=tokenizer, valid_share=0.1)
    assert content(tmp_path) == content(whole)


def test_a_part_cut_off_is_seen(folder: Path, tokenizer: Path, whole: Path, tmp_path: Path, here: None) -> None:
    """As after a copy between machines that was stopped."""
    make(tmp_path, folder, tokenizer=tokenizer, valid_share=0.1, shard=(0, 2))
    part = min(tmp_path.glob("parts/train/000000/*.npz"))
    data = part.read_bytes()
    cut, changed = data[:-40], data.replace(data[-600:-560], bytes(40))
    part.write_bytes(cut)
    with pytest.raises(DataError, match="is not a complete part"):
        make(tmp_path, folder, tokenizer=tokenizer, valid_share=0.1, shard=(1, 2))
    part.write_bytes(changed)
    make(tmp_path, folder, tokenizer=tokenizer, valid_share=0.1, shard=(1, 2))
    for damaged in (cut, changed):
        part.write_bytes(damaged)
        with pytest.raises(DataError, match="is not a complete part"):
            merge(tmp_path)
    part.unlink()
    make(tmp_path, folder, tokenizer=tokenizer, valid_share=0.1)
    assert content(tmp_path) == content(whole)


# --- What is wrong with the text, or with what was asked -------------------------------------------


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "never closed', "not a line of JSON"),
        (b'{"content": "elsewhere"}', "no key 'text', --key names another .there: 'content'."),
        (b'{"text": null}', "the value of 'text' is no text but NoneType"),
        (b'["text"]', "not an object of JSON"),
        (b'{"text": "\\ud800"}', "half of a surrogate pair"),
        (b'{"text": "\xff"}', "not a line of JSON"),
    ],
)
def test_a_broken_line_is_named(line: bytes, reason: str, tokenizer: Path, tmp_path: Path, here: None) -> None:
    good = lines(TEXTS[:90])
    first, second = good[: len(good) // 2], good[len(good) // 2 :]
    cut = second.index(b"\n") + 1
    text = first + second[:cut] + line + b"\n" + second[cut:]
    place = text[: text.index(line + b"\n")].count(b"\n") + 1
    for name, data in (("plain.jsonl", text), ("squeezed.jsonl.gz", gzip.compress(text))):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=f"{name}, line {place}: .*{reason}.*--on-error skip") as caught:
            make(tmp_path / f"{name}-stop", tmp_path / name, tokenizer=tokenizer)
        assert "\n" not in str(caught.value)
        manifest = make(tmp_path / f"{name}-skip", tmp_path / name, tokenizer=tokenizer, on_error="skip")
        assert manifest is not None and manifest["read"]["skipped"] == 1 and manifest["documents"]["train"] == 90
        start = len(b"\n".join(text.split(b"\n")[: place - 1])) + 1
        where = f"the line at byte {start}" if name == "plain.jsonl" else f"line {place}"
        assert f"{where}: " in manifest["read"]["skipped_where"][0]


def test_a_mended_line_goes_on(tokenizer: Path, tmp_path: Path, here: None) -> None:
    """The file alone is read again; once the set is finished, a file of another size is another source."""
    text = lines(TEXTS[:90])
    broken = bytearray(text)
    broken[len(text) - 2] = ord("{")
    (tmp_path / "a.jsonl").write_bytes(broken)
    with pytest.raises(DataError, match="line 90"):
        make(tmp_path / "out", tmp_path / "a.jsonl", tokenizer=tokenizer)
    kept = list((tmp_path / "out").glob("parts/*/*/*.npz"))
    assert kept
    (tmp_path / "a.jsonl").write_bytes(text)
    manifest = make(tmp_path / "out", tmp_path / "a.jsonl", tokenizer=tokenizer)
    assert manifest is not None and manifest["documents"]["train"] == 90
    (tmp_path / "a.jsonl").write_bytes(text + lines(["more"]))
    with pytest.raises(DataError, match=r"other settings .train_sources"):
        make(tmp_path / "out", tmp_path / "a.jsonl", tokenizer=tokenizer)


@pytest.mark.parametrize("name", ["b.jsonl.gz", "c.json.zst", "d.parquet"])
def test_a_source_cut_off_is_never_a_shorter_one(
    folder: Path, tokenizer: Path, tmp_path: Path, here: None, name: str
) -> None:
    (tmp_path / name).write_bytes((folder / name).read_bytes()[:-30])
    with pytest.raises(DataError, match=f"{name} (ends too early|is damaged|is not a complete Parquet file)"):
        make(tmp_path / "out", tmp_path / name, tokenizer=tokenizer, on_error="skip")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"bos": "document"}, 'other settings .bos: "none" then, "document" now'),
        ({"valid_share": 0.2}, "other settings .valid_share"),
        ({"tokens": 100}, "other settings .train: null then, 100 now"),
        ({"key": "id"}, "other settings .key"),
        ({"bos": "always"}, "--bos takes none or document"),
        ({"on_error": "ignore"}, "--on-error takes stop or skip"),
        ({"valid_share": 1.5}, "--valid-share takes a share"),
        ({"shard": (3, 3)}, "--shard takes i/n"),
        ({"valid_tokens": 5}, "--valid-tokens goes with --valid"),
    ],
)
def test_other_settings_are_refused(
    folder: Path, tokenizer: Path, whole: Path, here: None, change: dict[str, Any], sentence: str
) -> None:
    before = content(whole)
    with pytest.raises(DataError, match=sentence):
        make(whole, folder, **{"tokenizer": tokenizer, "valid_share": 0.1, **change})
    assert content(whole) == before


def test_the_same_again_is_no_work(folder: Path, tokenizer: Path, whole: Path) -> None:
    before = (whole / "train.bin").stat().st_mtime_ns
    again = make(whole, folder, tokenizer=tokenizer, valid_share=0.1, workers=7)
    assert again == json.loads((whole / "manifest.json").read_text())
    assert (whole / "train.bin").stat().st_mtime_ns == before


def test_a_foreign_manifest_is_left_alone(folder: Path, tokenizer: Path, tmp_path: Path, here: None) -> None:
    for text, sentence in (("{}", "other settings"), ("[1]", "not what this program writes"), ("x", "cannot be read")):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(DataError, match=sentence):
            make(tmp_path, folder, tokenizer=tokenizer)
        assert content(tmp_path) == {"manifest.json": text.encode()}


@pytest.mark.parametrize("name", ["train.bin", "valid.idx"])
def test_a_users_own_files_are_left_alone(name: str, folder: Path, tokenizer: Path, tmp_path: Path, here: None) -> None:
    (tmp_path / name).write_bytes(b"of weeks")
    with pytest.raises(DataError, match=f"{name} is there and not of this command"):
        make(tmp_path, folder, tokenizer=tokenizer)
    assert content(tmp_path) == {name: b"of weeks"}


def test_a_finished_set_that_lost_a_file_is_not_called_done(folder: Path, tokenizer: Path, tmp_path: Path) -> None:
    words = ["prepare", str(folder), "--tokenizer", str(tokenizer), "--out", str(tmp_path / "set"), "--workers", "1"]
    assert CliRunner().invoke(app, words).exit_code == 0
    (tmp_path / "set/train.bin").write_bytes(b"cut")
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 2 and "train.bin is not the file that manifest.json describes" in again.stderr
    assert (tmp_path / "set/train.bin").read_bytes() == b"cut"


def test_two_at_once_are_refused(folder: Path, tokenizer: Path, tmp_path: Path) -> None:
    from filelock import FileLock

    with FileLock(tmp_path / ".prepare-1-of-1.lock"), pytest.raises(DataError, match="another process is preparing"):
        make(tmp_path, folder, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("source", "sentence"), [("nowhere", "there is no .*nowhere: give a .jsonl"), ("empty", "holds nothing")]
)
def test_sources_that_are_none(tokenizer: Path, tmp_path: Path, source: str, sentence: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=sentence):
        make(tmp_path / "out", tmp_path / source, tokenizer=tokenizer)


def test_the_command_trains_a_tokenizer_and_prepares(folder: Path, tmp_path: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", "launch/prepare_data.sh", str(folder), "--out", str(tmp_path / "set"), *words]
        return jobs.run(command, cwd=ROOT)

    done = run("--train-tokenizer", "400", "--workers", "1")
    assert done.returncode == 0, done.stderr
    assert "train: " in done.stdout and "tokens/s" in done.stderr
    assert "7 empty documents kept" in done.stdout
    assert check_dataset(tmp_path / "set" / "train", tokenizer=tmp_path / "set" / "tokenizer.model") == []
    for words, sentence in (
        (
            ("--train-tokenizer", "401"),
            "it was trained with other vocab_size, 400: remove it, or use it by --tokenizer",
        ),
        (("--train-tokenizer", "400", "--key", "id"), "it was trained with other key, text: remove it"),
        (("--train-tokenizer", "401", "--bos", "always"), "--bos takes none or document"),
        ((), "give --tokenizer"),
        (("--tokenizer", "x.model", "--tokens", "many"), "--tokens takes a number such as 20B"),
        (("--tokenizer", "x.model"), "the tokenizer x.model does not exist"),
    ):
        refused = run(*words)
        assert refused.returncode == 2 and sentence in refused.stderr and "Traceback" not in refused.stderr


def test_skipping_reads_nothing_twice(tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each skipped line once had the whole file before it counted: days for a large one."""
    monkeypatch.setattr(LinesBlock, "_count_lines", lambda self: pytest.fail("the file is read again"))
    block = LinesBlock(0, True, 1, "a", str(tmp_path / "a.jsonl"), 0, 1 << 20)
    text = b'{"text": "one"}\n\n{"text": 2}\n{"tex'
    (tmp_path / "a.jsonl").write_bytes(text)
    places = [block.place(record) for record in block.records("text") if record.problem]
    assert places == [f"{tmp_path}/a.jsonl, the line at byte {start}" for start in (17, 29)]
    assert all(text[start:].startswith(b'{"tex') for start in (17, 29))


@pytest.mark.parametrize("largest", [300, 70_000])
def test_a_tokenizer_with_a_hole_is_refused(largest: int, tmp_path: Path) -> None:
    """Megatron makes a model of as many rows as there are tokens."""
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "</s>": 1, "[UNK]": 2, "b": largest}, "[UNK]")
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(tmp_path)
    with pytest.raises(DataError, match=f"has 4 tokens and gives one of them the number {largest:,}"):
        describe_tokenizer(str(tmp_path))
    with pytest.raises(CheckpointError, match="fill the gaps"):
        open_tokenizer(tmp_path)
