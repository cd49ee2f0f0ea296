# SPDX-License-Identifier: Apache-2.0
"""`simreg-megatron data corpus-builtin`: a corpus without a download, from the docstrings of the installed libraries.

A document is a module. Sources are parsed, never imported. A docstring that appeared before (inherited, copied,
vendored) is left out, so that none is on both sides of a split.
"""

import argparse
import ast
import hashlib
import importlib.metadata
import inspect
import json
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from simreg_megatron.tools import tokens
from simreg_megatron.tools.tokens import MANIFEST, DataError, load_tokenizer

_FORMAT = 1  # of the rules below: others make another corpus
_MOST_CHARACTERS, _VALIDATION_SHARE = 14_000_000, 0.03
_SHORTEST = 60  # characters; shorter docstrings say little
_SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "__pycache__", "_vendor", "vendored"}
_SKIPPED_FOLDERS |= {"site-packages", "dist-packages"}  # below the standard library; they are roots of their own
_FILES = ("train.bin", "train.idx", "valid.bin", "valid.idx", "tokenizer.model")


class BuiltinCorpus(NamedTuple):
    """Paths and manifest of the built corpus."""

    directory: Path
    train_prefix: Path
    valid_prefix: Path
    tokenizer_model: Path
    manifest: dict[str, Any]


def run(options: argparse.Namespace) -> None:
    corpus = ensure_builtin_corpus(options.out)
    for side, number in corpus.manifest["tokens"].items():
        print(f"{options.out / side}: {number:,} tokens")


def ensure_builtin_corpus(
    directory: str | os.PathLike[str], *, vocab_size: int = 4096, roots: Sequence[Path] | None = None
) -> BuiltinCorpus:
    """Return the corpus in `directory`, built now unless it is there already; many processes may ask at once.

    `roots` are the library folders to read: by default those of the running interpreter.
    """
    from filelock import FileLock

    directory = Path(directory).resolve()  # what a link leads to is what is replaced
    if roots is None:
        roots = list(dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")))
    folders = [str(root) for root in roots]  # packages below the roots alone: sys.path differs from script to script
    packages = sorted({f"{one.name}=={one.version}" for one in importlib.metadata.distributions(path=folders)})
    decides_the_text = [_FORMAT, sys.version, folders, vocab_size, _MOST_CHARACTERS, packages]
    fingerprint = hashlib.sha256(json.dumps(decides_the_text).encode()).hexdigest()
    if not (manifest := _read_manifest(directory, fingerprint)):
        directory.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{directory}.lock"):  # another process may have built it meanwhile
            manifest = _read_manifest(directory, fingerprint) or _build(directory, roots, vocab_size, fingerprint)
    return BuiltinCorpus(directory, directory / "train", directory / "valid", directory / "tokenizer.model", manifest)


def _read_manifest(directory: Path, fingerprint: str = "") -> dict[str, Any]:
    """Return the manifest of a built-in corpus in the folder, of a whole one with this fingerprint if given, or {}."""
    path = directory / MANIFEST
    manifest = dict(json.loads(path.read_text())) if path.is_file() else {}
    is_one = "fingerprint" in manifest and set(manifest.get("files", ())) == set(_FILES)
    if is_one and fingerprint:
        is_one = manifest["fingerprint"] == fingerprint and tokens.find_changed(directory, manifest) is None
    return manifest if is_one else {}


def _build(directory: Path, roots: Sequence[Path], vocab_size: int, fingerprint: str) -> dict[str, Any]:
    if not _read_manifest(directory) and any((directory / name).exists() for name in (*_FILES, MANIFEST)):
        raise DataError(f"{directory} has another set: name another folder, or remove this one")
    print("> corpus: reading the documentation of the installed libraries (about a minute in all)", flush=True)
    sides: dict[str, list[str]] = {"train": [], "valid": []}
    characters = 0
    for name, text in read_documents(roots):
        sides["valid" if is_validation(name) else "train"].append(text)
        characters += len(text)
        if characters >= _MOST_CHARACTERS:
            break
    (work := directory / "cache").mkdir(parents=True, exist_ok=True)
    print(f"> corpus: training a tokenizer of {vocab_size} pieces and tokenizing {characters:,} characters", flush=True)
    tokens.train_tokenizer(sides["train"], work / "tokenizer.model", vocab_size=vocab_size)
    counts = {side: write_pair(work / side, texts, work / "tokenizer.model") for side, texts in sides.items()}
    facts = load_tokenizer(str(work / "tokenizer.model")).describe()
    return tokens.publish(work, directory, _FILES, counts, fingerprint=fingerprint, **facts)


def write_pair(prefix: Path, texts: Sequence[str], tokenizer: str | Path) -> tuple[int, int]:
    """Tokenize documents into PREFIX.bin and .idx; return the number of documents and of tokens."""
    loaded = load_tokenizer(str(tokenizer))
    writer = tokens.PairWriter(prefix, loaded.vocab_size)
    for start in range(0, len(texts), 1000):  # some at a time: ids take ten times the room of their text
        for ids in loaded.encode(texts[start : start + 1000]):
            writer.add([*ids, loaded.eos_id])
    writer.close()
    return writer.documents, writer.tokens


def is_validation(name: str) -> bool:
    """Decide by the module's name, so that it stays on its side when other modules come or go."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) < _VALIDATION_SHARE * 2**32


def read_documents(roots: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Yield the name and the documentation of each module below the roots, in a fixed order, each docstring once."""
    seen: set[str] = set()
    for folder, path in [(root, path) for root in roots for path in sorted(root.rglob("*.py"))]:
        name = path.relative_to(folder)
        if _SKIPPED_FOLDERS & set(name.parts[:-1]):
            continue
        fresh = []
        for text in _docstrings(path):
            words = " ".join(text.split())
            if words not in seen:
                seen.add(words)
                fresh.append(text)
        if fresh:
            yield name.as_posix(), "\n\n".join(fresh)


def _docstrings(path: Path) -> list[str]:
    """Return the English docstrings of a source; none of one that cannot be parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's sources
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError):
        return []
    if "pydoc_data" in path.parts:  # the language reference, kept as one dictionary of strings
        values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    else:
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        values = [ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, documented)]
    texts = (inspect.cleandoc(text) for text in values if isinstance(text, str))
    in_ascii = (text for text in texts if len(text) >= _SHORTEST and text.isascii())
    return [text for text in in_ascii if sum(map(len, re.findall("[A-Za-z]{2,}", text))) > 0.55 * len(text)]  # prose
