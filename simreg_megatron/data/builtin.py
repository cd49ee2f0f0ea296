# SPDX-License-Identifier: Apache-2.0
"""The corpus that needs no download: built once per machine from installed documentation, and kept.

One process builds, the others wait. The build happens in a folder beside the final one and is renamed when whole, so
a build that was killed leaves nothing that looks finished.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simreg_megatron.data.assemble import MANIFEST
from simreg_megatron.data.corpus import Document, library_roots, read_documents
from simreg_megatron.data.encoding import write_dataset
from simreg_megatron.data.indexed import DataError, sha256
from simreg_megatron.data.tokenizer import train_tokenizer

FORMAT = 1
_MOST_CHARACTERS = 14_000_000  # more would only lengthen the build
_READING = 85  # per cent of a build's time, roughly; the tokenizer takes the rest
_FILES = ("train.bin", "train.idx", "valid.bin", "valid.idx", "tokenizer.model")


@dataclass(frozen=True)
class BuiltinCorpus:
    """Where the built corpus lies."""

    directory: Path
    manifest: dict[str, Any] = field(hash=False)

    @property
    def train_prefix(self) -> Path:
        return self.directory / "train"

    @property
    def valid_prefix(self) -> Path:
        return self.directory / "valid"

    @property
    def tokenizer_model(self) -> Path:
        return self.directory / "tokenizer.model"

    @property
    def manifest_path(self) -> Path:
        return self.directory / MANIFEST


def ensure_builtin_corpus(
    directory: str | os.PathLike[str],
    *,
    vocab_size: int = 4096,
    roots: Sequence[Path] | None = None,
    progress: bool = True,
) -> BuiltinCorpus:
    """The corpus in `directory`, built now unless it is there already.

    Args:
        directory: where it lies or shall lie; many processes may ask for the same one.
        vocab_size: size of the tokenizer trained on it.
        roots: library folders to read; the running interpreter's own by default.
        progress: whether the building process says what it does.

    Raises:
        DataError: the folder cannot be written, the disk is full, or the libraries hold too little text.
    """
    from filelock import FileLock

    directory = Path(directory).resolve()  # what a link leads to is what is replaced
    roots = library_roots() if roots is None else [Path(root) for root in roots]
    fingerprint = _fingerprint(roots, vocab_size)
    found, why = _existing(directory, fingerprint)
    if found is not None:
        return found
    say: Callable[[str], None] = (lambda text: print(f"> corpus: {text}", flush=True)) if progress else (lambda _: None)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{directory}.lock"):
            found, why = _existing(directory, fingerprint)  # another process may have built it meanwhile
            return found if found is not None else _build(directory, roots, vocab_size, fingerprint, say, why)
    except OSError as error:
        raise DataError(
            f"the built-in corpus cannot be written to {directory} ({error.strerror or error}): "
            "free some space there (100 MB), or choose a folder you may write to"
        ) from error


def _existing(directory: Path, fingerprint: str) -> tuple[BuiltinCorpus | None, str]:
    """The corpus if it is whole and still what would be built; else why not."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        sizes = {name: (directory / name).stat().st_size for name in _FILES}
    except (OSError, ValueError):
        return None, "damaged" if directory.exists() else "not there yet"
    if manifest.get("fingerprint") != fingerprint:
        return None, "made from other libraries or settings"
    if sizes != {name: manifest["files"][name]["bytes"] for name in _FILES}:
        return None, "damaged"
    return BuiltinCorpus(directory, manifest), ""


def _fingerprint(roots: Sequence[Path], vocab_size: int) -> str:
    """What the corpus depends on: the interpreter, the installed packages, the settings."""
    # Only what lies below the roots: sys.path differs between a script, a module and a test of the same environment.
    found = importlib.metadata.distributions(path=[str(root) for root in roots])
    packages = sorted({f"{dist.name}=={dist.version}" for dist in found})
    inputs = [FORMAT, sys.version, [str(root) for root in roots], vocab_size, _MOST_CHARACTERS, packages]
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()


def _build(
    directory: Path, roots: Sequence[Path], vocab_size: int, fingerprint: str, say: Callable[[str], None], why: str
) -> BuiltinCorpus:
    _refuse_anothers(directory)
    started = time.monotonic()
    for left in directory.parent.glob(f"{directory.name}.building-*"):
        shutil.rmtree(left, ignore_errors=True)  # of a build that was killed; the lock says that none is under way
    work = directory.with_name(f"{directory.name}.building-{os.getpid()}")
    work.mkdir()
    try:
        say(f"{why}, so it is built: reading the installed libraries' documentation (about a minute in all)")
        documents = _read(roots, say)
        train = [document.text for document in documents if not document.is_validation]
        valid = [document.text for document in documents if document.is_validation]
        if not train or not valid:
            raise DataError(f"too little documentation below {', '.join(map(str, roots))} to make a corpus of")
        say(f"training a tokenizer of {vocab_size} pieces on {sum(map(len, train)):,} characters")
        tokenizer = work / "tokenizer.model"
        train_tokenizer(train, tokenizer, vocab_size=vocab_size)
        say(f"tokenizing {len(documents):,} documents")
        counts = {
            name: write_dataset(work / name, texts, tokenizer) for name, texts in (("train", train), ("valid", valid))
        }
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "fingerprint": fingerprint,
            "characters": sum(len(document.text) for document in documents),
            "documents": {name: count[0] for name, count in counts.items()},
            "tokens": {name: count[1] for name, count in counts.items()},
            "vocab_size": vocab_size,
            "tokenizer_sha256": sha256(tokenizer),
            "files": {name: {"bytes": (work / name).stat().st_size, "sha256": sha256(work / name)} for name in _FILES},
        }
        (work / MANIFEST).write_text(json.dumps(manifest, indent=1))
        shutil.rmtree(directory, ignore_errors=True)
        work.rename(directory)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    say(f"{manifest['tokens']['train']:,} training tokens in {directory}, {time.monotonic() - started:.0f} s")
    return BuiltinCorpus(directory, manifest)


def _refuse_anothers(directory: Path) -> None:
    """Only a corpus that was built here may be replaced: whatever else has this name is its owner's."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        ours = "fingerprint" in manifest and set(manifest["files"]) == set(_FILES)
    except (OSError, ValueError, LookupError, TypeError):
        ours = not directory.exists() or not os.listdir(directory)
    if not ours:
        raise DataError(f"{directory} is there and is no built-in corpus: name another folder, or remove this one")


def _read(roots: Sequence[Path], say: Callable[[str], None]) -> list[Document]:
    """Documents up to the limit; says after each tenth of the characters how much of the whole work that is."""
    documents, characters, tenths = [], 0, 0
    for document in read_documents(roots):
        documents.append(document)
        characters += len(document.text)
        if (reached := 10 * min(characters, _MOST_CHARACTERS) // _MOST_CHARACTERS) > tenths:
            tenths = reached
            say(f"{_READING * tenths // 10} % of the work is done")
        if characters >= _MOST_CHARACTERS:
            break
    return documents
