# SPDX-License-Identifier: Apache-2.0
"""Blocks of an input: a few thousand documents that one worker reads, with a place to name for each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from simreg_megatron.data.indexed import DataError

Wanted = Callable[[int], bool]
"""Whether the block of this number is asked for: those that are done already, or another's, are passed over."""


class Record(NamedTuple):
    """A document, or why it is none; `number` counts from the block's beginning, `byte` from the file's, if known."""

    number: int
    text: str
    problem: str = ""
    byte: int | None = None


@dataclass(frozen=True)
class Block:
    """What all blocks have: a number inside the input, and roughly the input's bytes it stands for."""

    number: int
    is_last: bool
    weight: int

    def records(self, key: str) -> Iterator[Record]:
        raise NotImplementedError

    def where(self, index: int) -> str:
        """The place of a record, for a person who will look there."""
        raise NotImplementedError

    def place(self, record: Record) -> str:
        """The same of one among many: nothing is read for it."""
        return self.where(record.number)


@dataclass(frozen=True)
class LinesBlock(Block):
    """The lines of JSON that begin in [start, stop) of a plain file, or that `data` brings along."""

    name: str
    path: str
    start: int
    stop: int
    data: bytes | None = None
    first_line: int = 0

    def records(self, key: str) -> Iterator[Record]:
        data, first = self._read() if self.data is None else (self.data, None)
        for index, line in enumerate(data.split(b"\n")):
            if line and not line.isspace():
                yield Record(index, *_parse(line, key), byte=first)
            first = None if first is None else first + len(line) + 1

    def _read(self) -> tuple[bytes, int]:
        """The lines, and where in the file they begin."""
        with open(self.path, "rb") as stream:
            if self.start:
                stream.seek(self.start - 1)
                stream.readline()  # the line that an earlier block began
            first = stream.tell()
            data = stream.read(max(0, self.stop - first))
            return data if not data or data.endswith(b"\n") else data + stream.readline(), first

    def where(self, index: int) -> str:
        return f"{self.path}, line {(self.first_line or self._count_lines()) + index}"

    def place(self, record: Record) -> str:
        return self.where(record.number) if record.byte is None else f"{self.path}, the line at byte {record.byte}"

    def _count_lines(self) -> int:
        """The number of the block's first line: only who stops there reads so much."""
        lines, left = 1, self.start
        with open(self.path, "rb") as stream:
            while left and (data := stream.read(min(left, 1 << 24))):
                lines, left = lines + data.count(b"\n"), left - len(data)
            if self.start:
                stream.seek(self.start - 1)
                lines += stream.read(1) != b"\n"  # a line begun before ends here
        return lines


def _parse(line: bytes, key: str) -> tuple[str, str]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return "", f"not a line of JSON ({error})"
    return _text_of(row, key)


def _text_of(row: Any, key: str) -> tuple[str, str]:
    if not isinstance(row, Mapping):
        return "", "not an object of JSON with the text under a key"
    text = row.get(key)
    if isinstance(text, str):
        return text, ""
    if key not in row:
        return "", f"no key {key!r}, --key names another (there: {', '.join(map(repr, row)) or 'none'})"
    return "", f"the value of {key!r} is no text but {type(text).__name__}"


def open_parquet(path: Path) -> Any:
    """The file, its footer read.

    Raises:
        DataError: it is none, or is damaged.
    """
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path} needs the pyarrow library: pip install pyarrow") from None
    try:
        file = pyarrow.parquet.ParquetFile(path)
        _ = file.schema_arrow
    except Exception as error:  # a damaged file raises whatever its bytes happen to ask for, OSError among it
        raise _damaged(path, error) from None
    return file


def _values_of(column: Any) -> list[Any]:
    """Of bytes that are not UTF-8, as single values may have them, halves of pairs are left: the reader names those."""
    import pyarrow

    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        values = column.cast(pyarrow.large_binary()).to_pylist()
        return [value if value is None else value.decode("utf-8", "surrogateescape") for value in values]


def _damaged(path: Path, error: Exception) -> DataError:
    reason = " ".join(str(error).split())[:200]
    return DataError(f"{path} is not a complete Parquet file ({type(error).__name__}: {reason}): copy it again")


@dataclass(frozen=True)
class RowsBlock(Block):
    """A row group of a Parquet file; its index is the block's number."""

    name: str
    path: str

    def records(self, key: str) -> Iterator[Record]:
        file = open_parquet(Path(self.path))
        if not file.num_row_groups:
            return
        names = file.schema_arrow.names
        if key not in names:
            raise DataError(f"{self.path} has no column {key!r}: --key names one of {', '.join(names)}")
        for index, text in enumerate(self._values(file, key)):
            yield Record(index, *_text_of({key: text}, key))

    def _values(self, file: Any, key: str) -> Iterator[Any]:
        try:
            for batch in file.iter_batches(batch_size=2048, row_groups=[self.number], columns=[key], use_threads=False):
                yield from _values_of(batch.column(0))
        except Exception as error:  # as in open_parquet
            raise _damaged(Path(self.path), error) from None

    def where(self, index: int) -> str:
        return f"{self.path}, row {index + 1} of row group {self.number + 1}"


@dataclass(frozen=True)
class FilesBlock(Block):
    """Files of plain text, each one document."""

    names: tuple[str, ...]
    paths: tuple[str, ...]

    def records(self, key: str) -> Iterator[Record]:
        for index, path in enumerate(self.paths):
            with open(path, "rb") as stream:
                data = stream.read()
            try:
                yield Record(index, data.decode("utf-8-sig"))  # a mark of the byte order is no text
            except UnicodeDecodeError as error:
                yield Record(index, "", f"not UTF-8 ({error.reason} at byte {error.start})")

    def where(self, index: int) -> str:
        return self.paths[index]


@dataclass(frozen=True)
class TextsBlock(Block):
    """Rows that were streamed."""

    name: str
    rows: tuple[Any, ...]
    first_row: int

    def records(self, key: str) -> Iterator[Record]:
        for index, row in enumerate(self.rows):
            yield Record(index, *_text_of(row, key))

    def where(self, index: int) -> str:
        return f"{self.name}, row {self.first_row + index}"
