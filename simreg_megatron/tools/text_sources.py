# SPDX-License-Identifier: Apache-2.0
"""The texts behind the words of a command line: files, folders, and data sets of the Hugging Face Hub.

`find_groups` names the files, `load_group` reads them with `datasets`, and `texts_of` takes the texts out of the rows.
Lines of JSON are read as lines: `datasets` would want one type for every key, in all files.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simreg_megatron.tools.indexed import DataError

READABLE = "a .jsonl, .jsonl.gz, .jsonl.zst, .parquet or .txt file, a folder of them, hf:NAME, or c4"
_KINDS = {".jsonl": "line", ".ndjson": "line", ".json": "line", ".parquet": "parquet", ".txt": "document"}
_GROUP_BYTES = 1 << 30


@dataclass(frozen=True)
class Group:
    """Files of one kind that are read and tokenized together."""

    kind: str
    files: tuple[str, ...]
    key: str

    @property
    def name(self) -> str:
        return self.files[0] if len(self.files) == 1 else f"{self.files[0]} and {len(self.files) - 1:,} more"


def find_groups(sources: Sequence[str], key: str, split: str, leave_out: Set[str] = frozenset()) -> list[Group]:
    """Return the files of the sources in their order, those of folders sorted, in groups of one kind and 1 GiB.

    A source is a file, a folder, `c4`, or `hf:NAME[:CONFIG][@REVISION]`, of which `split` is taken; one without
    anything to read is a DataError. `leave_out` has real paths of files to pass over.
    """
    groups: list[tuple[str, list[str]]] = []
    room = 0
    for source in sources:
        found = [name for name in _files_of(source, split) if _kind(name)]
        if not found:
            raise DataError(f"{source} has nothing to read: give {READABLE}")
        for name in (each for each in found if os.path.realpath(each) not in leave_out):
            room -= file_bytes(name)
            if not groups or groups[-1][0] != _kind(name) or room < 0:
                groups.append((_kind(name), []))
                room = _GROUP_BYTES - file_bytes(name)
            groups[-1][1].append(name)
    return [Group(kind, tuple(files), key) for kind, files in groups]


def _files_of(source: str, split: str) -> list[str]:
    path = Path(source)
    if path.is_dir():  # without what is hidden, and .json, which mostly describes other files
        below = sorted(each for each in path.rglob("*") if each.is_file() and each.suffix != ".json")
        return [str(each) for each in below if "/." not in f"/{each.relative_to(path)}"]
    if source == "c4" or source.startswith("hf:"):
        return _files_of_hub("allenai/c4:en" if source == "c4" else source[3:], split)
    return [source] if path.is_file() else []


def _files_of_hub(source: str, split: str) -> list[str]:
    """Return the addresses of a data set's files, all of them at the commit that it has now."""
    import datasets

    name, _, revision = source.partition("@")
    name, _, configuration = name.partition(":")
    builder = datasets.load_dataset_builder(name, configuration or None, revision=revision or None)
    return [str(file) for file in builder.config.data_files.get(split, ())]


def _kind(name: str) -> str:
    return _KINDS.get(Path(re.sub(r"\.(gz|zst)$", "", name)).suffix, "")


def file_bytes(name: str) -> int:
    """Return the size of a file; 1 GiB for one of the Hub, whose size is not known."""
    return _GROUP_BYTES if "://" in name else Path(name).stat().st_size


def load_group(group: Group, cache: Path) -> Any:
    """Load a group as a `datasets.Dataset`: a row for each line, document, or value of the column."""
    import datasets

    options: dict[str, Any] = {"path": "parquet", "columns": [group.key], "batch_size": 1000}
    if group.kind != "parquet":
        features = datasets.Features({"text": datasets.Value("large_string")})
        options = {"path": "text", "sample_by": group.kind, "encoding": "utf-8-sig", "features": features}
    try:
        return datasets.load_dataset(**options, data_files=list(group.files), split="train", cache_dir=str(cache))
    except Exception as error:  # of many types; the cause of a DatasetGenerationError says what is wrong
        raise DataError(f"{group.name} cannot be read: {error.__cause__ or error!r}") from None


def texts_of(group: Group, rows: dict[str, list[Any]]) -> list[str]:
    """Return the texts of some rows of a group; blank lines have none, and any other without one is a DataError."""
    if group.kind == "document":
        return rows["text"]
    texts = []
    for row in rows[group.key if group.kind == "parquet" else "text"]:
        if group.kind == "line" and (not row or row.isspace()):
            continue
        try:
            text = json.loads(row)[group.key] if group.kind == "line" else row
            text.encode()  # half of a surrogate pair is no text
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise DataError(
                f"{group.name}: expected a text under the key {group.key!r} (--key), got {str(row)[:80]!r} ({error!r})"
            ) from None
        texts.append(text)
    return texts
