# SPDX-License-Identifier: Apache-2.0
"""The large corpus, from packages made here: what is read, what is left out, and the same bytes each time."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import shutil
import tarfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from typer.testing import CliRunner

from simreg_megatron.data import DataError, check_dataset
from simreg_megatron.data.commands import app
from simreg_megatron.data.indexed import sha256
from simreg_megatron.data.large import corpus as building
from simreg_megatron.data.large import ensure_large_corpus
from simreg_megatron.data.large.debian import Package, fetch, fetch_newest, read_files, read_lock, write_lock
from simreg_megatron.data.large.duplicates import SeenBlocks, SeenPages
from simreg_megatron.data.large.pages import SIDES, make_pages
from simreg_megatron.data.large.prose import Block, is_english
from simreg_megatron.data.large.readers import read_page
from simreg_megatron.data.large.recipe import PACKAGES
from simreg_megatron.data.tokens import open_tokens

VOCAB_SIZE = 320


def make_package(path: Path, files: Mapping[str, bytes]) -> None:
    """A .deb: an `ar` of three members, whose last is a tar of the files."""

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


def sentences(draw: random.Random, count: int) -> str:
    """English enough: every other word is a short one."""
    names = (
        "river",
        "window",
        "signal",
        "garden",
        "engine",
        "letter",
        "market",
        "planet",
        "bridge",
        "winter",
        "harbour",
    )
    short = ("the", "of", "and", "to", "in", "is", "that", "with", "for", "from")
    text = (" ".join(draw.choice(short) + " " + draw.choice(names) for _ in range(8)) for _ in range(count))
    return " ".join(sentence.capitalize() + "." for sentence in text)


def page(draw: random.Random) -> bytes:
    paragraphs = "".join(f"<p>{sentences(draw, 3)}</p>" for _ in range(3))
    return f"<html><body><nav>Home</nav><h1>A page</h1>{paragraphs}</body></html>".encode()


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two packages, and the lock of both."""
    folder = tmp_path_factory.mktemp("archive")
    draw = random.Random(0)
    pages = {f"usr/share/doc/one/{index:03}.html": page(draw) for index in range(90)}
    again = {"usr/share/doc/two/copy.html": pages["usr/share/doc/one/007.html"], "usr/share/doc/two/left.txt": b"no"}
    make_package(folder / "one_1.0-1_all.deb", pages)
    make_package(folder / "two_1%3a2-1_all.deb", {f"usr/share/doc/two/{i}.html": page(draw) for i in range(30)} | again)
    packages = []
    for name, version, file in (("one", "1.0-1", "one_1.0-1_all.deb"), ("two", "1:2-1", "two_1%3a2-1_all.deb")):
        packages.append(Package(name, version, file, (folder / file).stat().st_size, sha256(folder / file)))
    write_lock(folder / "lock.json", packages)
    return folder


def settings(archive: Path) -> dict[str, Any]:
    return {
        "packages": archive,
        "lock": archive / "lock.json",
        "recipe": {"one": r"\.html$", "two": r"\.html$"},
        "vocab_size": VOCAB_SIZE,
        "progress": False,
    }


@pytest.fixture(scope="module")
def built(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> building.LargeCorpus:
    return ensure_large_corpus(tmp_path_factory.mktemp("built") / "large", **settings(archive))


# What is read


def test_html_gives_paragraphs_below_their_headings() -> None:
    text = b"""<?xml version="1.0" encoding="utf-8"?><html><head><title>Not this: it is of the head</title></head>
    <body><nav>Go to the start of this book and to its end.</nav><h2>What it is</h2>
    <p>This is a <b>first</b> paragraph of <code>words</code> in\n a row.</p><pre>for (this; is; not) { it(); }</pre>
    <h2>Nothing below</h2><h2>Curly</h2><ul><li>It\xe2\x80\x99s an item that has the \xe2\x80\x9cquotes\xe2\x80\x9d of a
    book.</li><li>short</li></ul><div role="navigation">Or by a role, which is the way of the others.</div></body>"""
    assert read_page("a/b.html", text) == [
        Block("This is a first paragraph of words in a row.", "What it is"),
        Block('It\'s an item that has the "quotes" of a book.', "Curly"),
    ]


def test_manual_pages_lose_requests_and_listings() -> None:
    text = rb""".TH LS 1
.SH "SEE WHAT"
The command
.B ls
shows the files \- all of them \fIin\fP a folder.
.PP
.nf
this is a listing of the words that are not for us.
.fi
.de XX
this is the text of a macro and not of the page at all.
..
It can be used by the others, too, and it is.
"""
    assert read_page("usr/share/man/man1/ls.1.gz", text) == [
        Block("The command ls shows the files - all of them in a folder.", "See what"),
        Block("It can be used by the others, too, and it is."),
    ]


def test_text_with_light_markup() -> None:
    text = b"""A Title
=======

Read :ref:`the manual <label>` first, and then ``run_it`` with
**all** of the words that are in it.

.. note:: not this

* One item of the list that is long enough to be kept here.
* Another item of the list that is long enough to be kept.

# A head
See [the other page](http://a.b/c) for more of what this is about.
"""
    assert read_page("usr/share/doc/x/_sources/a.rst.txt", text) == [
        Block("Read the manual first, and then run_it with all of the words that are in it.", "A Title"),
        Block("One item of the list that is long enough to be kept here."),
        Block("Another item of the list that is long enough to be kept."),
        Block("See the other page for more of what this is about.", "A head"),
    ]


def test_pod_dictionaries_and_wordnet() -> None:
    pod = b"=head1 The I<name>\n\nUse L<the other|perlfunc> if C<$a B<and> $b> is what E<lt> you have.\n\n  my $a;\n"
    assert read_page("a.pod", pod) == [Block("Use the other if $a and $b is what < you have.", "The name")]
    entries = b"arthropod\n\n   An {animal} that has no bones, but legs with joints\n   [1913 Webster]\n"
    assert read_page("a.dict.dz", entries) == [Block("An animal that has no bones, but legs with joints", "arthropod")]
    words = b"  1 This software and database is being provided to you | by the licence\n"
    words += b"00 04 n 02 dog 0 domestic_dog 0 001 @ 00 n 0000 | a member of the genus Canis; it is kept by man  \n"
    assert read_page("usr/share/wordnet/data.noun", words) == [
        Block("dog, domestic dog: a member of the genus Canis; it is kept by man.")
    ]


@pytest.mark.parametrize(
    "text",
    [
        "Dies ist ein Absatz in einer anderen Sprache, und er hat viele kurze Worte darin.",
        'int main(int argc, char **argv) { return printf("%d", argc) < 0 ? 1 : 0; } // the end.',
        "Home | Next | Previous | Index | Contents | Search | Glossary | Downloads | About | Contact",
        "It is too short.",
    ],
)
def test_what_is_not_english_prose_is_left_out(text: str) -> None:
    assert not is_english(text)
    assert is_english("It is a sentence that has the words of one, and it ends with a stop.")


# What is left out


def test_a_paragraph_stands_once_whatever_its_case_numbers_and_marks() -> None:
    seen = SeenBlocks()
    assert seen.is_new("Version 1.2 of the program is here.")
    assert not seen.is_new("version 3.4 of the Program is here!")
    assert seen.is_new("Version 1.2 of the program was here.")


def test_a_page_nearly_like_another_is_left_out_and_a_distinct_one_kept() -> None:
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghijklmnop", k=6)) for _ in range(900)]
    changed = words.copy()
    changed[300] = changed[600] = "other"  # 10 of 896 rows of five words: similarity 0.98
    half = words[:450] + words[450:][::-1]  # similarity about a third
    seen = SeenPages()
    assert seen.is_new(" ".join(words))
    assert not seen.is_new(" ".join(changed))
    assert seen.is_new(" ".join(half))


def test_pages_are_cut_between_paragraphs_and_short_ones_left_out() -> None:
    draw = random.Random(2)
    long = [Block(sentences(draw, 40)) for _ in range(60)]
    counts: Counter[str] = Counter()
    files = [("p/long.html", long), ("p/again.html", long), ("q/short.html", [Block("It is.")])]
    pages = list(make_pages(files, counts))
    assert "\n".join(page.text for page in pages) == "\n".join(block.text for block in long)
    assert len(pages) > 1 and all(len(page.text) < 66_000 for page in pages)
    assert counts == {"blocks": 121, "repeated blocks": 60, "short pages": 1}


def test_sides_follow_from_the_text_alone() -> None:
    draw = random.Random(3)
    files = [(f"p/{index}.html", [Block(sentences(draw, 8))]) for index in range(1200)]
    sides = {page.text: page.side for page in make_pages(files, Counter())}
    alone = {page.text: page.side for page in make_pages(files[1100:], Counter())}
    assert alone == {text: sides[text] for text in alone}
    share = Counter(sides.values())
    assert set(share) == set(SIDES)
    assert all(0.03 < share[side] / len(sides) < 0.06 for side in ("valid", "test"))


# Packages


def test_files_of_a_package_are_read_without_unpacking(tmp_path: Path) -> None:
    files = {"usr/a.txt": b"one", "usr/b.txt.gz": gzip.compress(b"two"), "usr/c.png": b"picture"}
    make_package(tmp_path / "p.deb", files)
    found = list(read_files(tmp_path / "p.deb", r"\.txt(\.gz)?$"))
    assert found == [("./usr/a.txt", b"one"), ("./usr/b.txt.gz", b"two")]
    whole = (tmp_path / "p.deb").read_bytes()
    for broken in (whole[: len(whole) // 2], b"no package", whole[:8]):
        (tmp_path / "q.deb").write_bytes(broken)
        with pytest.raises(DataError, match=r"q\.deb cannot be read"):
            list(read_files(tmp_path / "q.deb", "."))


def test_a_damaged_gzip_file_is_a_fault_of_its_package(tmp_path: Path) -> None:
    packed = gzip.compress(b"text " * 50)
    make_package(tmp_path / "p.deb", {"usr/a.txt.gz": packed[:-8] + bytes(8)})  # its checksum
    with pytest.raises(DataError, match=r"p\.deb cannot be read \(CRC check failed"):
        list(read_files(tmp_path / "p.deb", "."))


def fake_apt(folder: Path, archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An apt-get that has the files of a folder."""
    script = (
        "#!/bin/sh\n"
        'case "$2" in *=*) file=$(echo "$2" | sed "s/:/%3a/;s/=/_/")_all.deb;; *) file="$2_*";; esac\n'
        f'cp {archive}/$file . 2>/dev/null || {{ echo "E: Version of $2 was not found" >&2; exit 100; }}\n'
    )
    folder.mkdir()
    (folder / "apt-get").write_text(script)
    (folder / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_packages_are_fetched_once_and_checked(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_apt(tmp_path / "bin", archive, monkeypatch)
    one, two = read_lock(archive / "lock.json").values()
    cache = tmp_path / "cache"
    assert fetch(two, cache).read_bytes() == (archive / two.file).read_bytes()
    assert [path.name for path in cache.iterdir()] == [two.file]
    with pytest.raises(DataError, match=r"one 9 cannot be fetched \(Version of one=9 was not found\).*--update-lock"):
        fetch(Package("one", "9", "one_9_all.deb", 1, ""), cache)
    (cache / one.file).write_bytes((archive / one.file).read_bytes()[:-1] + b"!")
    with pytest.raises(DataError, match="its SHA-256 differs"):
        fetch(one, cache)
    assert fetch_newest("one", cache) == one
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fetch(one, cache).exists()  # what is there needs no apt-get
    with pytest.raises(DataError, match="no apt-get here"):
        fetch(one, tmp_path / "empty")


def test_a_package_of_one_kind_of_machine_cannot_be_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "archive").mkdir()
    make_package(tmp_path / "archive" / "tool_1_amd64.deb", {"a": b"a"})
    fake_apt(tmp_path / "bin", tmp_path / "archive", monkeypatch)
    with pytest.raises(DataError, match="differs between machines"):
        fetch_newest("tool", tmp_path / "cache")


def test_the_lock_and_the_recipe_name_the_same_packages() -> None:
    assert list(read_lock(building.LOCK)) == list(PACKAGES)
    assert all(package.file.endswith("_all.deb") for package in read_lock(building.LOCK).values())


# The whole


def test_the_sets_are_whole_and_the_manifest_tells_them(built: building.LargeCorpus, archive: Path) -> None:
    manifest = built.manifest
    model = sentencepiece.SentencePieceProcessor(model_file=str(built.tokenizer_model))
    assert model.get_piece_size() == manifest["vocab_size"] == VOCAB_SIZE
    texts: dict[str, list[str]] = {}
    for side, prefix in zip(SIDES, (built.train_prefix, built.valid_prefix, built.test_prefix), strict=True):
        assert check_dataset(prefix, tokenizer=built.tokenizer_model) == []
        tokens = open_tokens(prefix)
        documents = np.split(tokens, np.flatnonzero(tokens == manifest["eos_id"]) + 1)[:-1]
        texts[side] = [model.decode(document[:-1].tolist()) for document in documents]
        assert len(documents) == manifest["documents"][side] > 0
        assert len(tokens) == manifest["tokens"][side]
        assert sum(map(len, texts[side])) == manifest["characters"][side] == manifest["utf8_bytes"][side]
        assert manifest["bytes_per_token"][side] == manifest["utf8_bytes"][side] / len(tokens)
    everything = [text for side in SIDES for text in texts[side]]
    assert len(set(everything)) == len(everything) == 120  # the copy is left out
    assert manifest["left_out"]["repeated blocks"] == 3
    assert {one["name"]: one["sha256"] for one in manifest["packages"]} == {
        name: sha256(archive / one.file) for name, one in read_lock(archive / "lock.json").items()
    }
    assert sum(one["characters"] for one in manifest["packages"]) == sum(manifest["characters"].values())
    for name, told in manifest["files"].items():
        assert told["sha256"] == sha256(built.directory / name)
    assert sorted(path.name for path in built.directory.iterdir()) == sorted([*manifest["files"], "manifest.json"])


def test_a_stopped_build_goes_on_to_the_same_bytes(
    built: building.LargeCorpus, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(building, "_tokenize", stop)
        with pytest.raises(KeyboardInterrupt):
            ensure_large_corpus(tmp_path / "large", **settings(archive))
    with monkeypatch.context() as patched:
        patched.setattr(building, "read_page", stop)  # what was read is not read again
        again = ensure_large_corpus(tmp_path / "large", workers=2, **settings(archive))
    assert again.manifest == built.manifest
    with monkeypatch.context() as patched:
        patched.setattr(building, "_build", stop)  # what is there is not built again
        assert ensure_large_corpus(tmp_path / "large", **settings(archive)).manifest == built.manifest


def test_another_lock_is_refused(built: building.LargeCorpus, archive: Path, tmp_path: Path) -> None:
    folder = tmp_path / "large"
    shutil.copytree(built.directory, folder)
    one, two = read_lock(archive / "lock.json").values()
    write_lock(tmp_path / "newer.json", [one, Package("two", "1:2-2", "two_1%3a2-2_all.deb", 3, "00")])
    with pytest.raises(DataError, match="holds a corpus of other packages"):
        ensure_large_corpus(folder, **settings(archive) | {"lock": tmp_path / "newer.json"})
    write_lock(tmp_path / "fewer.json", [one])
    with pytest.raises(DataError, match=r"differ in their packages \(two\)"):
        ensure_large_corpus(folder, **settings(archive) | {"lock": tmp_path / "fewer.json"})
    (tmp_path / "none.json").write_text(json.dumps({"packages": [{"name": two.name}]}))
    with pytest.raises(DataError, match="is no lock"):
        ensure_large_corpus(folder, **settings(archive) | {"lock": tmp_path / "none.json"})
    (folder / "test.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"test\.bin is not the file"):
        ensure_large_corpus(folder, **settings(archive))


def test_a_users_own_files_are_left_alone(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "large/tokenizer.model").write_bytes(b"of weeks")
    with pytest.raises(DataError, match=r"tokenizer\.model is there and not of this command"):
        ensure_large_corpus(tmp_path / "large", **settings(archive))
    assert [path.name for path in (tmp_path / "large").iterdir()] == ["tokenizer.model"]


def test_the_command_refuses_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(app, ["corpus-large", "--out", str(tmp_path / "large")])
    assert result.exit_code == 2
    assert "error: this corpus is made of Debian packages and there is no apt-get here" in result.stderr
