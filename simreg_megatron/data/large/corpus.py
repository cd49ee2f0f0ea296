# SPDX-License-Identifier: Apache-2.0
"""A corpus of some forty million tokens of English, made from the documentation that Debian packages hold.

Packages, pinned by a lock -> prose of their files -> pages without repeats -> train, valid and test by the hash of each
page -> a tokenizer trained on the first -> `prepare`. The same lock gives the same bytes. What a stopped build has done
is kept in a folder of its own, and the same call goes on with it; the manifest comes last.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from simreg_megatron import __version__
from simreg_megatron.data.assemble import MANIFEST
from simreg_megatron.data.builtin import BuiltinCorpus
from simreg_megatron.data.indexed import DataError, explain, sha256, sync_folder, whole_file
from simreg_megatron.data.large.debian import Package, fetch, fetch_newest, read_files, read_lock, write_lock
from simreg_megatron.data.large.pages import SIDES, make_pages
from simreg_megatron.data.large.prose import Block
from simreg_megatron.data.large.readers import read_page
from simreg_megatron.data.large.recipe import PACKAGES
from simreg_megatron.data.prepare import prepare
from simreg_megatron.data.progress import ConsoleProgress
from simreg_megatron.data.settings import read_json, refuse_anothers, refuse_changed, write_json
from simreg_megatron.data.task import Task
from simreg_megatron.data.tokenizer import train_tokenizer

FORMAT = 1  # of the readers and rules: another one makes other bytes of the same packages
VOCAB_SIZE = 8192
LOCK = Path(__file__).with_name("lock.json")
_FILES = (*(f"{side}{ending}" for side in SIDES for ending in (".bin", ".idx")), "tokenizer.model")
_UNFINISHED = ".build"


class LargeCorpus(BuiltinCorpus):
    """Where the large corpus lies: as the built-in one, with a test set."""

    @property
    def test_prefix(self) -> Path:
        return self.directory / "test"


def ensure_large_corpus(
    directory: str | os.PathLike[str],
    *,
    packages: str | os.PathLike[str] | None = None,
    lock: Path = LOCK,
    recipe: Mapping[str, str] = PACKAGES,
    vocab_size: int = VOCAB_SIZE,
    workers: int = 1,
    progress: bool = True,
) -> LargeCorpus:
    """The corpus in `directory`, built now unless it is there already.

    Args:
        directory: where it lies or shall lie; many processes may ask for the same one.
        packages: where the packages are kept; DIRECTORY.packages by default.
        lock: the versions and hashes of the packages.
        recipe: the packages and which of their files are read.
        vocab_size: size of the tokenizer trained on the training side.
        workers: processes that tokenize.
        progress: whether the building process says what it does.

    Raises:
        DataError: a package cannot be had or is another one than the lock's, the folder holds something else or
            cannot be written.
    """
    from filelock import FileLock

    directory = Path(directory).absolute()
    cache = Path(packages).absolute() if packages is not None else directory.with_name(f"{directory.name}.packages")
    plan = _Plan(_pinned(lock, recipe), recipe, vocab_size)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{directory}.lock"):
            manifest = _existing(directory, plan) or _build(directory, cache, plan, workers, progress)
    except OSError as error:
        raise DataError(explain(error, directory)) from error
    return LargeCorpus(directory, manifest)


def update_lock(
    packages: str | os.PathLike[str], *, lock: Path = LOCK, recipe: Mapping[str, str] = PACKAGES
) -> list[Package]:
    """Pin the versions that the archive has today, and fetch them into the folder `packages`.

    Raises:
        DataError: a package is not in the archive.
    """
    found = [fetch_newest(name, Path(packages).absolute()) for name in recipe]
    write_lock(lock, found)
    return found


@dataclass(frozen=True)
class _Plan:
    """What decides the bytes."""

    pinned: Sequence[Package]
    recipe: Mapping[str, str]
    vocab_size: int

    @property
    def fingerprint(self) -> str:
        inputs = [(package.name, package.sha256, self.recipe[package.name]) for package in self.pinned]
        return hashlib.sha256(json.dumps([FORMAT, self.vocab_size, inputs]).encode()).hexdigest()


def _pinned(lock: Path, recipe: Mapping[str, str]) -> list[Package]:
    known = read_lock(lock)
    if set(known) != set(recipe):
        names = ", ".join(sorted(set(known) ^ set(recipe)))
        raise DataError(f"{lock} and the recipe differ in their packages ({names}): make the lock with --update-lock")
    return [known[name] for name in recipe]


def _existing(directory: Path, plan: _Plan) -> dict[str, Any] | None:
    """The manifest of a whole corpus; None where one is still to be made."""
    manifest = read_json(directory / MANIFEST)
    if manifest is None:
        return None
    if manifest.get("fingerprint") != plan.fingerprint:
        raise DataError(
            f"{directory} holds a corpus of other packages or of another recipe: give another --out, or remove it"
        )
    refuse_changed(directory, manifest, MANIFEST)
    return manifest


def _build(directory: Path, cache: Path, plan: _Plan, workers: int, progress: bool) -> dict[str, Any]:
    """All stages; each is passed over where a build that was stopped had ended it."""
    if not (directory / _UNFINISHED).exists():
        refuse_anothers(directory, _FILES)
    work = directory / _UNFINISHED / plan.fingerprint[:16]
    work.mkdir(parents=True, exist_ok=True)
    files = [
        _prose_of(package, plan.recipe[package.name], cache, directory / _UNFINISHED)
        for package in _told(plan.pinned, progress)
    ]
    say: Callable[[str], None] = (lambda text: print(f"> corpus: {text}", flush=True)) if progress else (lambda _: None)
    facts = read_json(work / "facts.json")
    if facts is None:
        say("leaving out repeats (some minutes)")
        facts = _write_sides(_read_prose(files), work)
        write_json(work / "facts.json", facts)
    tokenizer = work / "tokenizer.model"
    if not tokenizer.exists():
        say(f"training a tokenizer of {plan.vocab_size} pieces")
        unfinished = tokenizer.with_suffix(".writing")
        train_tokenizer(_texts(work / "train.jsonl"), unfinished, vocab_size=plan.vocab_size)
        unfinished.replace(tokenizer)
    made = _tokenize(work, tokenizer, workers, progress)
    for name in _FILES:
        source = _source_of(work, name)
        if source.exists():  # else a build that was stopped here has moved it
            source.replace(directory / name)
    sync_folder(directory)
    manifest = _manifest(plan, facts, made["pairs"], made["pairs-test"], directory)
    write_json(directory / MANIFEST, manifest)
    shutil.rmtree(directory / _UNFINISHED)
    return manifest


def _told(pinned: Sequence[Package], progress: bool) -> Iterator[Package]:
    """The packages one by one, with a bar in a terminal and a line for each in a log."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    if progress and console.is_terminal:
        yield from track(pinned, "reading packages", console=console)
        return
    for number, package in enumerate(pinned, start=1):
        if progress:
            print(f"> corpus: package {number} of {len(pinned)}, {package.name} {package.version}", flush=True)
        yield package


def _prose_of(package: Package, pattern: str, cache: Path, folder: Path) -> Path:
    """A file with the prose of a package: a line of JSON for each of its files, the name and the blocks."""
    key = hashlib.sha256(json.dumps([FORMAT, package.sha256, pattern]).encode()).hexdigest()[:16]
    output = folder / f"{package.name}-{key}.jsonl"
    if output.exists():
        return output
    with whole_file(output) as stream:
        for name, data in read_files(fetch(package, cache), pattern):
            blocks = read_page(name, data)
            if blocks:
                line = json.dumps([f"{package.name}/{name.removeprefix('./')}", blocks], ensure_ascii=False)
                stream.write(line.encode() + b"\n")
    return output


def _read_prose(files: Iterable[Path]) -> Iterator[tuple[str, list[Block]]]:
    for path in files:
        with path.open(encoding="utf-8") as stream:
            for line in stream:
                name, blocks = json.loads(line)
                yield name, [Block(*block) for block in blocks]


def _write_sides(files: Iterable[tuple[str, list[Block]]], folder: Path) -> dict[str, Any]:
    """One file of lines for each side, in the order of the pages' hashes; what they hold."""
    left_out: Counter[str] = Counter()
    pages = sorted(make_pages(files, left_out), key=lambda page: page.key)
    of_packages: Counter[str] = Counter()
    for page in pages:
        of_packages[page.package] += len(page.text)
    facts: dict[str, Any] = {
        "characters": {},
        "utf8_bytes": {},
        "left_out": dict(left_out),
        "characters_of_packages": dict(of_packages),
    }
    for side in SIDES:
        mine = [page for page in pages if page.side == side]
        facts["characters"][side] = sum(len(page.text) for page in mine)
        facts["utf8_bytes"][side] = sum(len(page.text.encode()) for page in mine)
        with whole_file(folder / f"{side}.jsonl") as stream:
            for page in mine:
                line = json.dumps({"text": page.text, "package": page.package}, ensure_ascii=False)
                stream.write(line.encode() + b"\n")
    return facts


def _texts(path: Path) -> list[str]:
    with path.open(encoding="utf-8") as stream:
        return [json.loads(line)["text"] for line in stream]


def _tokenize(work: Path, tokenizer: Path, workers: int, progress: bool) -> dict[str, dict[str, Any]]:
    """The pairs of train and valid, and then of test: the manifest of each."""
    asked = {"pairs": (["train.jsonl"], ["valid.jsonl"]), "pairs-test": (["test.jsonl"], [])}
    made = {}
    with ConsoleProgress() if progress else nullcontext() as told:
        for folder, (sources, valid) in asked.items():
            task = Task(
                sources=[str(work / name) for name in sources],
                valid_sources=[str(work / name) for name in valid],
                output=work / folder,
                tokenizer=str(tokenizer),
                workers=workers,
            )
            made[folder] = prepare(task, told) or {}
    return made


def _manifest(
    plan: _Plan, facts: Mapping[str, Any], pairs: Mapping[str, Any], test: Mapping[str, Any], directory: Path
) -> dict[str, Any]:
    """What the files of `directory` hold and what they were made of, under the names that `prepare` uses."""
    tokens = {**pairs["tokens"], "test": test["tokens"]["train"]}
    tokenizer = ("dtype", "vocab_size", "eos_id", "bos_id", "tokenizer_name", "tokenizer_sha256")
    characters = facts["characters_of_packages"]
    return {
        "format": FORMAT,
        "made_by": f"simreg-megatron {__version__}",
        "fingerprint": plan.fingerprint,
        "documents": {**pairs["documents"], "test": test["documents"]["train"]},
        "tokens": tokens,
        "characters": facts["characters"],
        "utf8_bytes": facts["utf8_bytes"],
        # The text's bytes for each token, end-of-text among the tokens: bits a byte are bits a token divided by this.
        "bytes_per_token": {side: facts["utf8_bytes"][side] / tokens[side] for side in SIDES},
        "left_out": facts["left_out"],
        **{name: pairs[name] for name in tokenizer},
        "libraries": {name: importlib.metadata.version(name) for name in ("lxml", "numpy", "sentencepiece")},
        "python": platform.python_version(),
        "files": {
            name: {"bytes": (directory / name).stat().st_size, "sha256": sha256(directory / name)} for name in _FILES
        },
        "packages": [
            {**asdict(package), "read": plan.recipe[package.name], "characters": characters.get(package.name, 0)}
            for package in plan.pinned
        ],
    }


def _source_of(work: Path, name: str) -> Path:
    if name == "tokenizer.model":
        return work / name
    if name.startswith("test."):
        return work / "pairs-test" / name.replace("test.", "train.")
    return work / "pairs" / name
