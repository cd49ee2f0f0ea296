# SPDX-License-Identifier: Apache-2.0
"""Megatron's `torch_dist` format: tensors in chunks, found through `.metadata`, read one chunk at a time.

A file `__N_M.distcp` is a row of `torch.save` archives; `.metadata` tells where each begins, how long it is, and which
part of which tensor it holds. So a tensor, or one layer of a tensor that is stacked over layers, costs reading
its own bytes and no others, whatever layout of ranks wrote them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from simreg_megatron.checkpoint.errors import CheckpointError
from simreg_megatron.checkpoint.pickles import load_pickle, load_torch
from simreg_megatron.sentences import brief

METADATA = ".metadata"
_NOT_THE_MODEL = ("optimizer.", "chained_")  # the optimizer's: far more than the model, and never read here
_FILE = re.compile(r"[\w+-][\w.+-]{0,200}")
_COPY = "copy the checkpoint again from where it was made"


@dataclass(frozen=True)
class Place:
    """A `torch.save` archive inside a file."""

    path: Path
    start: int
    length: int

    def read(self) -> Any:
        with self.path.open("rb") as stream:
            stream.seek(self.start)
            return load_torch(stream.read(self.length), path=self.path)


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor: where it begins, its sizes, and where it lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place


@dataclass(frozen=True)
class Stored:
    """A whole tensor, as `.metadata` describes it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    def read(self, index: Sequence[int] = ()) -> Tensor:
        """The tensor, or `tensor[index]` for leading indices.

        Raises:
            CheckpointError: its chunks do not cover it exactly once, or a file holds something else than announced.
        """
        lead, shape = len(index), self.shape[len(index) :]
        whole = torch.empty(shape, dtype=self.dtype)
        num_read = 0
        for chunk in self.chunks:
            if any(not o <= i < o + s for i, o, s in zip(index, chunk.offsets, chunk.sizes, strict=False)):
                continue
            part = self._read_chunk(chunk)[tuple(i - o for i, o in zip(index, chunk.offsets, strict=False))]
            box = tuple(slice(o, o + s) for o, s in zip(chunk.offsets[lead:], chunk.sizes[lead:], strict=True))
            whole[box] = part
            num_read += part.numel()
        if num_read != whole.numel():
            raise CheckpointError(
                f"the chunks of {self.name} hold {num_read} of its {whole.numel()} numbers: the checkpoint was not "
                f"saved completely, or was changed; {_COPY}"
            )
        return whole

    def _read_chunk(self, chunk: Chunk) -> Tensor:
        tensor = chunk.place.read()
        if not isinstance(tensor, Tensor) or tensor.dtype != self.dtype or tuple(tensor.shape) != chunk.sizes:
            raise CheckpointError(f"{chunk.place.path} does not hold the part of {self.name} it should: {_COPY}")
        return tensor


class DistCheckpoint:
    """One folder of the `torch_dist` format.

    Attributes:
        tensors: what it holds, by Megatron's keys.
        objects: where its other objects lie, by theirs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sizes: dict[str, int] = {}
        metadata = load_pickle(folder / METADATA)
        places = self._places(metadata)
        self.tensors: dict[str, Stored] = {}
        self.objects: dict[str, Place] = {}
        for name, entry in _items(metadata, "state_dict_metadata", folder):
            if name.startswith(_NOT_THE_MODEL):
                continue
            if type(entry).__name__ == "TensorStorageMetadata":
                self.tensors[name] = self._stored(name, entry, places)
            elif (name, None) in places:
                self.objects[name] = places[name, None]

    def _places(self, metadata: Any) -> dict[tuple[str, tuple[int, ...] | None], Place]:
        """Where everything lies, by key and offsets; no offsets for what is not a tensor."""
        places = {}
        for index, info in _items(metadata, "storage_data", self.folder):
            offset = getattr(index, "offset", None)
            key = (index.fqn, None if offset is None else tuple(offset))
            places[key] = self._place(info)
        return places

    def _place(self, info: Any) -> Place:
        name, start, length = info.relative_path, info.offset, info.length
        if not isinstance(name, str) or not _FILE.fullmatch(name) or not isinstance(start, int) or start < 0:
            raise CheckpointError(f"{self.folder / METADATA} points outside its folder, to {brief(name)}: {_COPY}")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(f"{self.folder / name} is compressed, which Megatron never does: {_COPY}")
        path = self.folder / name
        if name not in self._sizes:
            if not path.is_file():
                raise CheckpointError(f"{path} is missing, and {METADATA} says that it holds weights: {_COPY}")
            self._sizes[name] = path.stat().st_size
        if not isinstance(length, int) or not 0 < length <= self._sizes[name] - start:
            raise CheckpointError(f"{path} ends at {self._sizes[name]} bytes, before its last part: {_COPY}")
        return Place(path, start, length)

    def _stored(self, name: str, entry: Any, places: dict[tuple[str, tuple[int, ...] | None], Place]) -> Stored:
        shape, chunks = tuple(entry.size), []
        for chunk in entry.chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            inside = len(offsets) == len(sizes) == len(shape) and all(
                type(o) is type(s) is type(n) is int and o >= 0 and s >= 0 and o + s <= n
                for o, s, n in zip(offsets, sizes, shape, strict=True)
            )
            if not inside or (name, offsets) not in places:
                raise CheckpointError(f"{self.folder / METADATA} does not say where all of {name} lies: {_COPY}")
            chunks.append(Chunk(offsets, sizes, places[name, offsets]))
        if len({chunk.offsets for chunk in chunks}) != len(chunks) or sum(
            prod(chunk.sizes) for chunk in chunks
        ) != prod(shape):
            raise CheckpointError(
                f"{self.folder / METADATA} covers {name} with gaps or twice: the checkpoint was not saved "
                f"completely, or was changed; {_COPY}"
            )
        properties = entry.properties
        dtype = properties.state[0] if hasattr(properties, "state") else getattr(properties, "dtype", None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{self.folder / METADATA} gives {name} no number type: {_COPY}")
        self._check_bytes(name, dtype, chunks)
        return Stored(name, shape, dtype, tuple(chunks))

    def _check_bytes(self, name: str, dtype: torch.dtype, chunks: Sequence[Chunk]) -> None:
        """Nothing is compressed, so a tensor is never larger than its files; memory is taken only after this."""
        taken: Counter[str] = Counter()
        for chunk in chunks:
            taken[chunk.place.path.name] += chunk.place.length
            if prod(chunk.sizes) * dtype.itemsize > self._sizes[chunk.place.path.name]:
                raise CheckpointError(f"{chunk.place.path} is too short for the part of {name} it should hold: {_COPY}")
        if any(length > self._sizes[file] for file, length in taken.items()):
            raise CheckpointError(f"{self.folder / METADATA} has several parts of {name} in one place: {_COPY}")


def _items(metadata: Any, attribute: str, folder: Path) -> list[tuple[Any, Any]]:
    table = getattr(metadata, attribute, None)
    if not isinstance(table, dict):
        raise CheckpointError(f"{folder / METADATA} has no table {attribute}: it is not a checkpoint's; {_COPY}")
    return list(table.items())
