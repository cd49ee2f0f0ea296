# SPDX-License-Identifier: Apache-2.0
"""The token ids of a set, mapped into memory and not read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from simreg_megatron.data.check import check_dataset
from simreg_megatron.data.indexed import FIXED, DataError

if TYPE_CHECKING:
    import numpy as np

_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}  # Megatron's codes of whole numbers


def open_tokens(prefix: Path) -> np.memmap:
    """All ids of `prefix`.bin [tokens], documents one after the other.

    Raises:
        DataError: the pair is not whole, or holds no token ids.
    """
    import numpy as np

    check_dataset(prefix)
    with Path(f"{prefix}.idx").open("rb") as stream:
        code = FIXED.unpack(stream.read(FIXED.size))[2]
    if code not in _TYPES:
        raise DataError(f"{prefix}.idx says that the .bin holds fractions (number type {code}), which are no tokens")
    return np.memmap(f"{prefix}.bin", dtype=_TYPES[code], mode="r")


def document_lengths(prefix: Path) -> np.ndarray:
    """Tokens of each sequence of `prefix`, in order; they are its documents, unless a tool cut these into several."""
    import numpy as np

    with Path(f"{prefix}.idx").open("rb") as stream:
        count = FIXED.unpack(stream.read(FIXED.size))[3]
        return np.fromfile(stream, dtype=np.int32, count=count)
