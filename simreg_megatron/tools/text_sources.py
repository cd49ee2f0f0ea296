# SPDX-License-Identifier: Apache-2.0
"""The texts behind the words of a command line: files, folders, and data sets of the Hugging Face Hub.

`find_groups` names the files, `load_group` reads them with `datasets`, and `texts_of` takes the texts out of the rows.
Lines of JSON are read as lines: `datasets` would want one type for every key, in all files.
"""

from __future__ import annotations

import glob
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
        readable = [name for name in _files_of(source, split) if _kind(name)]
        found = [name for name in readable if _kind(name) == "document" or file_bytes(name)]  # an empty .txt is one
        if not found:
            raise DataError(f"{source} has nothing to read: give {READABLE}")
        for name in (each for each in found if os.path.realpath(each) not in leave_out):
            room -= file_bytes(name)
            if not groups or groups[-1][0] != _kind(name) or room < 0:
                groups.append((_kind(name), []))
                room = _GROUP_BYTES - file_bytes(name)
            groups[-1][1].append(name)
    if sources and not groups:
        raise DataError(f"all of {', '.join(sources)} is given as --valid as well: give another source")
    return [Group(kind, tuple(files), key) for kind, files in groups]


def _files_of(source: str, split: str) -> list[str]:
    path = Path(source)
    if path.is_file():
        return [source]
    if path.is_dir():
        first: dict[str, str] = {}  # links may lead to a file twice
        found = glob.glob(f"{glob.escape(str(path))}/**", recursive=True)  # without what is hidden
        for name in sorted(found, key=lambda name: Path(name).parts):
            if Path(name).suffix != ".json" and not os.path.isdir(name):  # a .json mostly describes other files
                first.setdefault(os.path.realpath(name), name)
        return list(first.values())
    if source == "c4" or source.startswith("hf:"):
        return _files_of_hub("allenai/c4:en" if source == "c4" else source[3:], split)
    raise DataError(f"there is no {source}: give {READABLE}")


def _files_of_hub(source: str, split: str) -> list[str]:
    """Return the addresses of a data set's files, all of them at the commit that it has now."""
    import datasets

    name, _, revision = source.partition("@")
    name, _, configuration = name.partition(":")
    try:
        builder = datasets.load_dataset_builder(name, configuration or None, revision=revision or None)
        return [str(file) for file in builder.config.data_files[split]]
    except Exception as error:  # the network's, the Hub's and the library's own
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise DataError(
            f"hf:{source} ({split}) cannot be opened ({reason}): check the name and the network, or download its files "
            "and name the folder"
        ) from None


def _kind(name: str) -> str:
    return _KINDS.get(Path(re.sub(r"\.(gz|zst)$", "", name)).suffix, "")


def file_bytes(name: str) -> int:
    """Return the size of a file; 1 GiB for one of the Hub, whose size is not known."""
    return _GROUP_BYTES if "://" in name else Path(name).stat().st_size


def load_group(group: Group, cache: Path) -> Any:
    """Load a group as a `datasets.Dataset`: a row for each line, document, or value of the column."""
    import datasets

    for name in group.files:
        if name.endswith(".zst") and "://" not in name:
            _refuse_cut(name)
    options: dict[str, Any] = {"path": "parquet", "columns": [group.key], "batch_size": 1000}
    if group.kind != "parquet":
        features = datasets.Features({"text": datasets.Value("large_string")})
        options = {"path": "text", "sample_by": group.kind, "encoding": "utf-8-sig", "features": features}
    try:
        return datasets.load_dataset(**options, data_files=list(group.files), split="train", cache_dir=str(cache))
    except Exception as error:  # of many kinds; the cause of a DatasetGenerationError says what is wrong
        cause = error.__cause__ or error
        if isinstance(cause, OSError) and cause.errno:  # of the disk, such as a full one
            raise cause from None
        if isinstance(cause, UnicodeDecodeError):
            name = next((name for name in group.files if _count_rows(name) is None), group.name)
            raise DataError(
                f"{name} is not UTF-8 ({cause.reason}): convert it to UTF-8, with iconv for example"
            ) from None
        reason = " ".join(f"{type(cause).__name__}: {cause}".split())[:300]
        key_too = f"; --key is {group.key!r}" if group.kind == "parquet" else ""
        raise DataError(f"{group.name} cannot be read ({reason}): copy it again{key_too}") from None


def _refuse_cut(name: str) -> None:
    """Refuse a .zst file that ends inside a frame: its reader takes that for the end of the text."""
    import zstandard

    frame = zstandard.ZstdDecompressor().decompressobj()
    try:
        with open(name, "rb") as file:
            while block := frame.unused_data or file.read(1 << 17):
                frame = zstandard.ZstdDecompressor().decompressobj() if frame.eof else frame
                frame.decompress(block)
    except zstandard.ZstdError as error:
        raise DataError(f"{name} cannot be read ({error}): copy it again") from None
    if not frame.eof:
        raise DataError(f"{name} ends in the middle of a frame: copy it again")


def _count_rows(name: str) -> int | None:
    """Return the number of rows of a file of text; None if it is not UTF-8, or cannot be read."""
    import fsspec

    try:
        with fsspec.open(name, "rt", encoding="utf-8", compression="infer") as lines:
            return sum(1 for _ in lines)
    except (OSError, UnicodeDecodeError):
        return None


def _place(group: Group, number: int) -> str:
    """Name the file of a group's row, and its row there."""
    for name in group.files if group.kind == "line" else ():
        if number < (rows := _count_rows(name) or 0):
            return f"{name}, row {number + 1:,}"
        number -= rows
    return f"{group.name}, row {number + 1:,}"


def texts_of(group: Group, rows: dict[str, list[Any]], numbers: Sequence[int]) -> list[str]:
    """Return the texts of some rows of a group; blank lines have none, and any other without one is a DataError."""
    kind, key, texts = group.kind, group.key, []
    for number, row in zip(numbers, rows[key if kind == "parquet" else "text"], strict=True):
        if kind == "line" and (not row or row.isspace()):
            continue
        try:
            text = json.loads(row)[key] if kind == "line" else row
            text.encode()  # half of a surrogate pair is no text
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{_place(group, number)}: expected a text under the key {key!r} (--key), got {str(row)[:80]!r} "
                f"({type(error).__name__}: {str(error)[:100]})"
            ) from None
        if kind == "document" and "\0" in text:
            file = f"{group.name}, file {number + 1:,}"
            raise DataError(f"{file}: it has zero bytes, so it is no UTF-8 text ({text[:40]!r})")
        texts.append(text)
    return texts
