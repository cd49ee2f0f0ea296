# SPDX-License-Identifier: Apache-2.0
"""English text that is on every machine: the docstrings of the installed Python libraries.

Sources are parsed by `ast`, never imported. A document is a module. A docstring that appeared before (inherited,
copied, vendored) is left out, so that none is on both sides of a split.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

_VALIDATION_SHARE = 0.03
_SHORTEST = 60  # characters; shorter docstrings say little
_SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "__pycache__", "_vendor", "vendored"}
_SKIPPED_FOLDERS |= {"site-packages", "dist-packages"}  # below the standard library; they are roots of their own
_TOPICS = "pydoc_data"  # the language reference, kept as one dictionary of strings
_WORD = re.compile(r"[A-Za-z]{2,}")


def library_roots() -> list[Path]:
    """Return the folders of the standard library and of the installed packages."""
    paths = sysconfig.get_paths()
    return list(dict.fromkeys(Path(paths[name]) for name in ("stdlib", "purelib", "platlib")))


def is_validation(name: str) -> bool:
    """Decide by the module's name, so that it stays on its side when other modules come or go."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) < _VALIDATION_SHARE * 2**32


def read_documents(roots: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Yield the name and the documentation of each module below the roots, in a fixed order, each docstring once."""
    files = [
        (root, path)
        for root in roots
        for path in sorted(root.rglob("*.py"))
        if not _SKIPPED_FOLDERS & set(path.relative_to(root).parts[:-1])
    ]
    seen: set[bytes] = set()
    with ProcessPoolExecutor(2) as pool:
        found = pool.map(_docstrings, [path for _, path in files], chunksize=64)
        for (root, path), docstrings in zip(files, found, strict=True):
            fresh = []
            for text in docstrings:
                digest = hashlib.blake2b(" ".join(text.split()).encode(), digest_size=16).digest()
                if digest not in seen:
                    seen.add(digest)
                    fresh.append(text)
            if fresh:
                yield path.relative_to(root).as_posix(), "\n\n".join(fresh)


def _docstrings(path: Path) -> list[str]:
    """Return the English docstrings of a source; none of one that cannot be parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's sources
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError):
        return []
    if _TOPICS in path.parts:
        constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        texts = [value for value in constants if isinstance(value, str)]
    else:
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        nodes = (node for node in ast.walk(tree) if isinstance(node, documented))
        texts = [text for text in (ast.get_docstring(node, clean=False) for node in nodes) if text]
    return [text for text in map(inspect.cleandoc, texts) if _is_english(text)]


def _is_english(text: str) -> bool:
    """Whether a docstring is prose in ASCII: long enough, mostly letters in words, few symbols."""
    if len(text) < _SHORTEST or not text.isascii():
        return False
    return sum(map(len, _WORD.findall(text))) > 0.55 * len(text)
