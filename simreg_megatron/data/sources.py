# SPDX-License-Identifier: Apache-2.0
"""Where text comes from: inputs in a fixed order, each cut into blocks of about the same size.

The cuts depend on the inputs and on the block size alone, never on who reads or how fast: a block has a number, and the
same number always means the same documents. A block travels to a worker, which reads it there where the input can be
entered in the middle (plain lines, Parquet, files of text); of a compressed file or a data set of the Hub the block
brings its text along.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from simreg_megatron.data.blocks import Block, FilesBlock, LinesBlock, RowsBlock, Wanted, open_parquet
from simreg_megatron.data.compressed import decompressed
from simreg_megatron.data.folders import hash_of_ends, kind_of, walk
from simreg_megatron.data.hub import HUB, HubFile, open_hub
from simreg_megatron.data.indexed import DataError
from simreg_megatron.data.settings import ENDS

C4 = "c4"
_MOST_READ = 64  # files of text whose ends tell a source from another
_LINE, _RATIO = 8 << 20, 10  # a longer line may stand for so many times its bytes; English comes to 3 or 4
_KINDS = "a .jsonl (also .jsonl.gz, .jsonl.zst), .parquet or .txt file, a folder of them, hf:NAME, or c4"


class Input(Protocol):
    """One file, some files of text, or one file of a data set of the Hub."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int: ...  # in bytes; 1 for a file of the Hub, where only the network knows

    @property
    def shared(self) -> bool: ...  # whether several nodes can take blocks of it in turn

    @property
    def files(self) -> tuple[Path, ...]: ...

    def blocks(self, size: int, wanted: Wanted) -> Iterator[Block]: ...

    def identity(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class _OneFile:
    """A file of many documents, known again by its name, its size and its ends."""

    path: Path
    name: str
    size: int

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.path,)

    def identity(self) -> dict[str, Any]:
        return {"name": self.name, "bytes": self.size, ENDS: hash_of_ends(self.files)}


@dataclass(frozen=True)
class PlainLines(_OneFile):
    """A .jsonl file: a line belongs to the block in which it begins."""

    shared = True

    def blocks(self, size: int, wanted: Wanted) -> Iterator[Block]:
        for number, start in enumerate(range(0, max(self.size, 1), size)):
            stop = min(start + size, self.size)
            if wanted(number):
                yield LinesBlock(number, stop == self.size, stop - start, self.name, str(self.path), start, stop)


@dataclass(frozen=True)
class CompressedLines(_OneFile):
    """A .jsonl.gz or .zst file: read from its beginning by one process, block by block."""

    shared = False

    def blocks(self, size: int, wanted: Wanted) -> Iterator[Block]:
        number, line, data, before, searched = 0, 1, bytearray(), 0, 0
        for piece, position in decompressed(self.path):
            data += piece
            while (cut := data.find(b"\n", max(size - 1, searched)) + 1) and len(data) > cut:
                content = bytes(memoryview(data)[:cut])
                del data[:cut]
                searched = 0
                if wanted(number):
                    yield self._block(number, content, line, position - before)
                line += content.count(b"\n")
                number, before = number + 1, position
            searched = max(0, len(data) - 1)  # the last byte may be a line's end whose block was not yet complete
            if len(data) > max(size + _LINE, _RATIO * position):
                raise DataError(
                    f"{self.path} has a line of over {_LINE >> 20} MiB in {position} compressed bytes, which is no "
                    "text: get it again from where it was made"
                )
        if wanted(number):
            yield self._block(number, bytes(data), line, self.size - before, is_last=True)

    def _block(self, number: int, data: bytes, line: int, weight: int, *, is_last: bool = False) -> Block:
        return LinesBlock(number, is_last, weight, self.name, str(self.path), 0, len(data), data, line)


@dataclass(frozen=True)
class Parquet(_OneFile):
    """A .parquet file: a block is a row group, whatever its size."""

    shared = True

    def blocks(self, size: int, wanted: Wanted) -> Iterator[Block]:
        groups = open_parquet(self.path).num_row_groups
        for number in range(max(groups, 1)):
            if wanted(number):
                weight = self.size // max(groups, 1)
                yield RowsBlock(number, number == groups - 1 or not groups, weight, self.name, str(self.path))


@dataclass(frozen=True)
class TextFiles:
    """Files of plain text, each one document."""

    paths: tuple[Path, ...]
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    shared = True

    @property
    def files(self) -> tuple[Path, ...]:
        return self.paths

    @property
    def name(self) -> str:
        return self.names[0] if len(self.names) == 1 else f"{self.names[0]} to {self.names[-1]}"

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def blocks(self, size: int, wanted: Wanted) -> Iterator[Block]:
        number = start = weight = 0
        for index, more in enumerate(self.sizes):
            weight += more
            is_last = index == len(self.sizes) - 1
            if weight >= size or is_last:
                if wanted(number):
                    paths = tuple(map(str, self.paths[start : index + 1]))
                    yield FilesBlock(number, is_last, weight, self.names[start : index + 1], paths)
                number, start, weight = number + 1, index + 1, 0

    def identity(self) -> dict[str, Any]:
        listing = "\n".join(f"{size} {name}" for name, size in zip(self.names, self.sizes, strict=True))
        digest = hashlib.sha256(listing.encode("utf-8", "surrogateescape")).hexdigest()
        some = self.paths[:: -(-len(self.paths) // _MOST_READ)]
        facts = {"name": self.name, "files": len(self.paths), "bytes": self.size, "listing_sha256": digest}
        return facts | {ENDS: hash_of_ends(some)}


def find_inputs(
    sources: Sequence[str], *, split: str = "train", leave_out: Callable[[Path], bool] = lambda _: False
) -> list[Input]:
    """The inputs behind the words of a command line, in their order; a folder's files in the order of their names.

    Args:
        sources: the words.
        split: of data sets of the Hub.
        leave_out: asked of each file that would be read.

    Raises:
        DataError: a source is not there, or nothing in it can be read.
    """
    inputs: list[Input] = []
    for source in sources:
        if source == C4 and not Path(source).exists():
            source = f"{HUB}allenai/c4:en"
        if source.startswith(HUB):
            source, _, revision = source.partition("@")
            stream, commit = open_hub(source, split, revision)
            inputs += [HubFile(source, split, commit, index, stream.num_shards) for index in range(stream.num_shards)]
            continue
        path = Path(source)
        if not path.is_dir() and not path.is_file():
            raise DataError(f"there is no {source}: give {_KINDS}")
        root = path if path.is_dir() else path.parent
        found = walk(path) if path.is_dir() else [path] if kind_of(path) else []
        if not found:
            named = "; .json files are read only if you name them" if root == path and any(root.rglob("*.json")) else ""
            raise DataError(f"{source} holds nothing that can be read: give {_KINDS}{named}")
        kept = [one for one in found if not leave_out(one)]
        if not kept:
            raise DataError(
                f"all of {source} is given as --valid as well, so it adds no text to train on: leave it out"
            )
        inputs += _group(kept, root=root)
    return inputs


def _group(paths: Iterable[Path], *, root: Path) -> list[Input]:
    inputs: list[Input] = []
    texts: list[tuple[Path, str, int]] = []

    def close_texts() -> None:
        if texts:
            inputs.append(TextFiles(*map(tuple, zip(*texts, strict=True))))
            texts.clear()

    makers: dict[str, Callable[[Path, str, int], Input]] = {
        "lines": PlainLines,
        "compressed": CompressedLines,
        "parquet": Parquet,
    }
    for path in paths:
        kind, name, size = kind_of(path), path.relative_to(root).as_posix(), path.stat().st_size
        if kind == "text":
            texts.append((path, name, size))
        else:
            close_texts()
            inputs.append(makers[kind](path, name, size))
    close_texts()
    return inputs
