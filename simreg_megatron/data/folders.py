# SPDX-License-Identifier: Apache-2.0
"""The files of a folder that hold text, through links but in no circle; and what tells a file from another."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

_LINES = (".jsonl", ".ndjson", ".json")
_COMPRESSED = (".gz", ".zst")
_END = 1 << 16


def kind_of(path: Path) -> str:
    """How a file's text is kept, by its name: lines, compressed, parquet or text; empty where it has none."""
    base = path.name[: -len(path.suffix)] if path.suffix in _COMPRESSED else path.name
    if base.endswith(_LINES):
        return "compressed" if path.suffix in _COMPRESSED else "lines"
    return {".parquet": "parquet", ".txt": "text"}.get(path.suffix, "")


def walk(folder: Path) -> list[Path]:
    """Files that hold text; a plain .json in a folder mostly describes others, so it counts only when named itself."""
    found = []
    ways: dict[str, tuple[Path, ...]] = {
        os.fspath(folder): (folder.resolve(),)
    }  # to each folder: itself and those above, wherever links lead
    for root, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
        way = ways.pop(root)
        for name in [name for name in folders if not name.startswith(".")]:
            target = Path(root, name).resolve()
            if not _leads_back(target, way):
                ways[os.path.join(root, name)] = (*way, target)
        folders[:] = [name for name in folders if os.path.join(root, name) in ways]
        found += [Path(root, name) for name in names if not name.startswith(".") and not name.endswith(".json")]
    return sorted((path for path in found if kind_of(path)), key=lambda path: path.relative_to(folder).parts)


def _leads_back(target: Path, way: tuple[Path, ...]) -> bool:
    """Whether a folder on the way lies in the target: every file there would be read dozens of times."""
    return any(one.is_relative_to(target) for one in way)


def _raise(error: OSError) -> None:
    raise error  # else a folder that may not be read would be an empty one


def hash_of_ends(paths: Iterable[Path]) -> str:
    """Of the first and the last 64 KiB of each file: cheap, and another file has others."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as stream:
            digest.update(stream.read(_END))
            stream.seek(max(stream.tell(), path.stat().st_size - _END))
            digest.update(stream.read(_END))
    return digest.hexdigest()
