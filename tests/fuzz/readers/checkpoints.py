# SPDX-License-Identifier: Apache-2.0
"""Pickles of checkpoints: one that passes `safe_load.check_pickle` must ask for nothing that is not listed."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

from simreg_megatron.tools import safe_load
from simreg_megatron.tools.safe_load import CheckpointError
from tests.fuzz.target import Target

_WORDS = (
    b"cposix\nsystem\n(S'id'\ntR.", b"\x8c\x08builtins\x8c\x04eval\x93", b"ctests.fuzz.foreign\nName\n", b"(lp0\n",
    b"ctorch\nSize\n", b"cargparse\nNamespace\n", b"\x80\x04", b"h\x00", b"q\x00", b"\x94", b"0", b"2", b"\x93", b"i",
    b"\x82\x01", b"cio\nBytesIO\n", b"\x8c\x05posix\x94\x8c\x06system\x94", b"}(", b"u.", b")\x81", b"b.", b"R", b".",
)  # fmt: skip


class _Ghost:
    """Stands for whatever a pickle names."""

    def __init__(self, *arguments: Any) -> None: ...

    def _ignore(self, *values: Any) -> None: ...

    __setitem__ = __setstate__ = append = extend = add = _ignore


class _Follower(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        assert safe_load._ALLOWED.fullmatch(f"{module}.{name}"), f"{module}.{name} was not seen"
        return _Ghost

    def persistent_load(self, pid: Any) -> _Ghost:
        return _Ghost()


def _read(folder: Path, data: bytes) -> None:
    try:
        safe_load.check_pickle(data, "it")
    except CheckpointError:
        raise
    except Exception as error:  # as check_checkpoint does
        raise CheckpointError(f"it cannot be read ({type(error).__name__}: {error})") from None
    try:
        _Follower(io.BytesIO(data)).load()
    except AssertionError:
        raise
    except Exception as error:
        raise CheckpointError(f"it cannot be loaded ({type(error).__name__})") from None


def pickle_in(archive: bytes) -> bytes:
    """The pickle in what `torch.save` wrote."""
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return opened.read(next(name for name in opened.namelist() if name.endswith("data.pkl")))


TARGETS = (Target("common-pickle", _read, (CheckpointError,), words=_WORDS, mutations=400),)
