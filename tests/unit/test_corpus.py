# SPDX-License-Identifier: Apache-2.0
"""The large corpus, from two small packages; the real one is checked by its hashes in benchmarks/results."""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece

from research.corpus.build import LOCK, build_corpus
from research.corpus.debian import Package, read_lock, write_lock
from research.corpus.pages import SIDES
from research.corpus.recipe import PACKAGES
from simreg_megatron.tools.indexed import DataError, read_tokens, sha256

NAMES = ("river", "window", "signal", "garden", "engine", "letter", "market", "planet")
SHORT = ("the", "of", "and", "to", "in", "is", "that", "with")


def make_package(path: Path, files: Mapping[str, bytes]) -> None:
    """Write a .deb: an `ar` of three members, whose last is a tar of the files."""

    def member(name: str, data: bytes) -> bytes:
        return f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(data):<10}`\n".encode() + data + b"\n" * (len(data) % 2)

    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:xz") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(f"./{name}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    control = member("debian-binary", b"2.0\n") + member("control.tar.xz", b"odd")
    path.write_bytes(b"!<arch>\n" + control + member("data.tar.xz", content.getvalue()))


def page(draw: random.Random) -> bytes:
    sentences = (" ".join(f"{draw.choice(SHORT)} {draw.choice(NAMES)}" for _ in range(8)) for _ in range(9))
    paragraphs = "".join(f"<p>{sentence.capitalize()}.</p>" for sentence in sentences)
    return f"<html><body><nav>Home</nav><h1>A page</h1>{paragraphs}</body></html>".encode()


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two packages, of which the second repeats a page of the first, and their lock."""
    folder, draw = tmp_path_factory.mktemp("archive"), random.Random(0)
    pages = {f"usr/share/doc/one/{index:03}.html": page(draw) for index in range(90)}
    again = {"usr/share/doc/two/copy.html": pages["usr/share/doc/one/007.html"], "usr/share/doc/two/left.txt": b"no"}
    make_package(folder / "one_1.0-1_all.deb", pages)
    make_package(folder / "two_1%3a2-1_all.deb", {f"usr/share/doc/two/{i}.html": page(draw) for i in range(30)} | again)
    packages = []
    for name, version, file in (("one", "1.0-1", "one_1.0-1_all.deb"), ("two", "1:2-1", "two_1%3a2-1_all.deb")):
        packages.append(Package(name, version, file, (folder / file).stat().st_size, sha256(folder / file)))
    write_lock(folder / "lock.json", packages)
    return folder


def build(out: Path, archive: Path, **more: Any) -> dict[str, Any]:
    settings = {"lock": archive / "lock.json", "recipe": {"one": r"\.html$", "two": r"\.html$"}, "vocab_size": 320}
    return build_corpus(out, archive, **settings | more)


def test_the_whole(archive: Path, tmp_path: Path) -> None:
    made = build(tmp_path / "large", archive)
    assert build(tmp_path / "again", archive, workers=2) == made == build(tmp_path / "large", archive)
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "large" / "tokenizer.model"))
    everything = []
    for side in SIDES:
        tokens = read_tokens(tmp_path / "large" / side)
        documents = np.split(tokens, np.flatnonzero(tokens == made["eos_id"]) + 1)[:-1]
        texts = [model.decode(document[:-1].tolist()) for document in documents]
        assert (len(documents), len(tokens)) == (made["documents"][side], made["tokens"][side])
        assert sum(map(len, texts)) == made["characters"][side]
        everything += texts
    assert len(set(everything)) == len(everything) == 120 and made["left_out"]["repeated blocks"] == 9
    one, two = read_lock(archive / "lock.json").values()
    write_lock(tmp_path / "newer.json", [one, Package("two", "1:2-2", two.file, 3, "00")])
    with pytest.raises(DataError, match="large is there and is not this corpus"):
        build(tmp_path / "large", archive, lock=tmp_path / "newer.json")


def test_the_lock_the_recipe_and_the_evidence_are_of_one_corpus() -> None:
    lock = read_lock(LOCK)
    assert list(lock) == list(PACKAGES) and all(package.file.endswith("_all.deb") for package in lock.values())
    recorded = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "large_corpus.json").read_text())
    assert {one["name"]: one["sha256"] for one in recorded["packages"]} == {
        name: one.sha256 for name, one in lock.items()
    }
