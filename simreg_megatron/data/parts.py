# SPDX-License-Identifier: Apache-2.0
"""Parts: the tokens of one block in one file, whole or not there at all, whenever the machine stops.

A part is an .npz archive (its checksums are zip's): lengths and tokens of the block's training and validation
documents, in their order, and a header. It is written under another name, put on the disk, and renamed.
"""

from __future__ import annotations

import contextlib
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simreg_megatron.data.indexed import DataError, whole_file

if TYPE_CHECKING:
    import numpy as np

SIDES = ("train", "valid")
ARRAYS = tuple(f"{side}_{name}" for name in ("lengths", "tokens") for side in SIDES)
_NAMED = 20  # broken records that a part names; the others it counts
_OWN = re.compile(r"\d{6,}\.npz(\.writing-.*)?")


@dataclass
class PartHeader:
    """What a part holds, and the `fingerprint` of what made it; the counts add up to the set's."""

    is_last: bool
    weight: int
    documents: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SIDES, 0))
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SIDES, 0))
    characters: int = 0
    empty: int = 0
    skipped: int = 0
    skipped_where: list[str] = field(default_factory=list)
    made_with: str = ""

    def skip(self, reason: str) -> None:
        self.skipped += 1
        if len(self.skipped_where) < _NAMED:
            self.skipped_where.append(reason)


class PartStore:
    """The folder of parts: number `block` of input `input`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, input: int, block: int) -> Path:
        return self.folder / f"{input:06d}" / f"{block:06d}.npz"

    def has(self, input: int, block: int) -> bool:
        return self.path(input, block).is_file()

    def header(self, input: int, block: int, made_with: str) -> PartHeader:
        return self.read(input, block, made_with, only_header=True)[0]

    def read(
        self, input: int, block: int, made_with: str, *, only_header: bool = False
    ) -> tuple[PartHeader, dict[str, np.ndarray]]:
        """A part that these settings made.

        Raises:
            DataError: others did, or it is not whole.
        """
        header, arrays = read_part(self.path(input, block), only_header=only_header)
        if header.made_with != made_with:
            raise DataError(
                f"{self.path(input, block)} was made of another source or with other settings than settings.json in "
                f"{self.folder.parent} tells: remove it, and run its shard again with the settings of all others"
            )
        return header, arrays

    def known(self, input: int) -> Iterator[int]:
        """The numbers of the blocks of an input that are there."""
        folder = self.folder / f"{input:06d}"
        if folder.is_dir():
            yield from sorted(int(path.stem) for path in folder.glob("*.npz"))

    def drop(self, input: int) -> None:
        """Remove the parts of an input, and what a killed process left of others; nothing else that lies there."""
        folder = self.folder / f"{input:06d}"
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if _OWN.fullmatch(path.name):
                path.unlink()
        remove_if_empty(folder)

    def clear(self) -> None:
        for folder in sorted(self.folder.glob("[0-9]*")):
            if folder.name.isdecimal():
                self.drop(int(folder.name))
        remove_if_empty(self.folder)


def remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def write_part(path: Path, header: PartHeader, arrays: dict[str, np.ndarray]) -> None:
    import numpy as np

    path.parent.mkdir(parents=True, exist_ok=True)
    text = np.frombuffer(json.dumps(asdict(header)).encode(), dtype=np.uint8)
    contents: dict[str, Any] = {"header": text, **arrays}
    with whole_file(path) as stream:
        np.savez(stream, **contents)


def read_part(path: Path, *, only_header: bool = False) -> tuple[PartHeader, dict[str, np.ndarray]]:
    """Header and arrays.

    Raises:
        DataError: the file is not a whole part.
    """
    import numpy as np

    try:
        with zipfile.ZipFile(path) as archive:
            if any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist()):
                raise ValueError("it is compressed")
        with np.load(path, allow_pickle=False) as archive:
            header = PartHeader(**json.loads(archive["header"].tobytes()))
            arrays = {} if only_header else {name: archive[name] for name in ARRAYS}
        _check_arrays(arrays)
    except FileNotFoundError:
        raise
    except Exception as error:  # a damaged archive raises whatever its bytes happen to ask for
        raise DataError(
            f"{path} is not a complete part ({type(error).__name__}: {error}), as after a copy that was cut off: "
            "remove it and give the same command again, or copy it again from where it was made"
        ) from None
    return header, arrays


def _check_arrays(arrays: Mapping[str, np.ndarray]) -> None:
    for name, array in arrays.items():
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(f"{name} is no row of whole numbers")
    for side in SIDES if arrays else ():
        lengths, tokens = arrays[f"{side}_lengths"], arrays[f"{side}_tokens"]
        if (lengths < 0).any() or lengths.sum() != len(tokens):
            raise ValueError(f"the lengths of {side} do not add up to its tokens")
