# SPDX-License-Identifier: Apache-2.0
"""English text that every Python installation holds: the docstrings of its libraries.

Sources are parsed by `ast`, never imported. One document is one module; a docstring that appeared before (inherited,
copied, vendored) is left out, so none stands on both sides of the split.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

VALIDATION_SHARE = 0.03
_SHORTEST = 60  # characters; shorter docstrings say little
_SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "__pycache__", "_vendor", "vendored"}
_TOPICS = "pydoc_data"  # the language reference, kept as one dictionary of strings
_WORD = re.compile(r"[A-Za-z]{2,}")


@dataclass(frozen=True)
class Document:
    """The documentation of one module: its path below the library folder, and the text."""

    name: str
    text: str

    @property
    def is_validation(self) -> bool:
        """Decided by the name alone, so that it never moves when other modules come or go."""
        return int(hashlib.sha256(self.name.encode()).hexdigest()[:8], 16) < VALIDATION_SHARE * 2**32


def library_roots() -> list[Path]:
    """The standard library and the installed packages of the running interpreter."""
    paths = sysconfig.get_paths()
    return list(dict.fromkeys(Path(paths[name]) for name in ("stdlib", "purelib", "platlib")))


def read_documents(roots: Iterable[Path], *, workers: int = 2) -> Iterator[Document]:
    """All modules' documentation below the roots, in a fixed order, each docstring once."""
    files = [(root, path) for root in roots for path in _sources(root)]
    seen: set[bytes] = set()
    with ProcessPoolExecutor(workers) as pool:
        for (root, path), docstrings in zip(files, pool.map(_docstrings, files, chunksize=64), strict=True):
            fresh = []
            for text in docstrings:
                digest = hashlib.blake2b(" ".join(text.split()).encode(), digest_size=16).digest()
                if digest not in seen:
                    seen.add(digest)
                    fresh.append(text)
            if fresh:
                yield Document(path.relative_to(root).as_posix(), "\n\n".join(fresh))


def _sources(root: Path) -> list[Path]:
    nested = {"site-packages", "dist-packages"}
    return sorted(
        path for path in root.rglob("*.py") if not (_SKIPPED_FOLDERS | nested) & set(path.relative_to(root).parts[:-1])
    )


def _docstrings(source: tuple[Path, Path]) -> list[str]:
    _, path = source
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's sources
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError):
        return []
    texts = _strings(tree) if _TOPICS in path.parts else _documentation(tree)
    return [text for text in (inspect.cleandoc(text) for text in texts) if _is_english(text)]


def _documentation(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield text


def _strings(tree: ast.Module) -> Iterator[str]:
    return (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_english(text: str) -> bool:
    """Prose in ASCII: long enough, mostly letters in words, few symbols."""
    if len(text) < _SHORTEST or not text.isascii():
        return False
    letters = sum(len(word) for word in _WORD.findall(text))
    return letters > 0.55 * len(text)
