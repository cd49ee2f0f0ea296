# SPDX-License-Identifier: Apache-2.0
"""Read what `torch.save` and `pickle` wrote without running it.

A pickle names the functions and classes that it wants called. Here every name is looked up in a short list: tensors,
numbers and containers are themselves, the few classes of Megatron, torch and the standard library that checkpoints hold
are answered by inert records, which keep what they were given and do nothing, and any other name is an error. Nothing
is imported because a file says so.
"""

from __future__ import annotations

import collections
import io
import pickle
import re
import struct
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch._weights_only_unpickler import get_globals_in_pkl

from simreg_megatron.checkpoint.errors import CheckpointError
from simreg_megatron.checkpoint.keys import WeighingUnpickler

_FAMILIES = ("megatron.", "transformer_engine.", "simreg_megatron.", "torch.distributed.checkpoint.")
_RECORDS = {
    "argparse.Namespace",
    "types.SimpleNamespace",
    "signal.Signals",
    "datetime.timedelta",
    "pathlib.Path",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    "_io.BytesIO",
    "numpy.ndarray",
    "numpy.dtype",
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
    "torch.serialization._get_layout",
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
}
# Megatron's arguments hold one (--exit-signal), which Python 3.10 writes by its name and not as signal.Signals(15).
_SIGNAL = re.compile(r"signal\.SIG[A-Z0-9]+")


class Inert:
    """Stands for an object of a class that is never imported: it keeps what the pickle gave it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.__dict__.update(options)
        self.arguments = arguments

    def __repr__(self) -> str:
        kept = self.arguments[0] if type(self) is Inert and self.arguments else self
        return f"<{type(kept).__name__}>"

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict) and all(isinstance(name, str) for name in state):
            self.__dict__.update(state)
        else:
            self.state = state


_inert: dict[str, type[Inert]] = {}


def _stand_in(name: str) -> type[Inert] | None:
    """An inert class for a name of the list; None for any other."""
    if name not in _RECORDS and not name.startswith(_FAMILIES) and not _SIGNAL.fullmatch(name):
        return None
    return _inert.setdefault(name, type(name.rpartition(".")[2], (Inert,), {}))


def _plain() -> dict[str, Any]:
    dtypes = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    containers = {"collections.OrderedDict": collections.OrderedDict, "builtins.set": set, "__builtin__.set": set}
    return {"torch.Size": torch.Size, **containers, **dtypes}


_PLAIN = _plain()


def _load_bytearray8(reader: Any) -> None:
    """Python's own makes that room, too, before it reads the bytes."""
    (length,) = struct.unpack("<Q", reader.read(8))
    reader.append(bytearray(reader.read(length)))


class _ListedOnly(WeighingUnpickler):
    """Python's own form of the reader: the one in C makes room for as many objects as a damaged number says."""

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        found = _PLAIN.get(full) or _stand_in(full)
        if found is None:
            raise _UnlistedError(full)
        return found

    dispatch: ClassVar[dict[int, Any]] = {**WeighingUnpickler.dispatch, pickle.BYTEARRAY8[0]: _load_bytearray8}


class _Ghost:
    """Stands for everything that a pickle names where only its tuples and keys are of interest."""

    def __init__(self, *arguments: Any, **options: Any) -> None: ...

    def _ignore(self, *values: Any) -> None: ...

    __setitem__ = __setstate__ = append = extend = add = _ignore


class _Weighing(WeighingUnpickler):
    """Follows a pickle for its weights alone, without any of its objects."""

    def find_class(self, module: str, name: str) -> Any:
        return _PLAIN.get(f"{module}.{name}", _Ghost)

    def persistent_load(self, pid: Any) -> _Ghost:
        return _Ghost()


class _UnlistedError(Exception):
    """The name that a pickle asked for."""


def _refused(name: str, path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} asks for {name[:120]} to be called, which no Megatron checkpoint needs: it may have been made to run "
        "code on this machine; nothing of it was run. Get the checkpoint from where it was trained"
    )


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    reason = (str(error).strip().splitlines() or [""])[0]
    return CheckpointError(
        f"{path} cannot be read ({type(error).__name__}: {reason[:120]}), so it was cut off or changed: copy the "
        "checkpoint again from where it was made"
    )


def load_pickle(path: Path) -> Any:
    """A plain pickle, such as the `.metadata` of a `torch_dist` checkpoint, of listed names only.

    Raises:
        CheckpointError: it asks for another name, or is damaged.
    """
    try:
        data = path.read_bytes()
        return _ListedOnly(io.BytesIO(data), length=len(data)).load()
    except _UnlistedError as error:
        raise _refused(str(error), path) from None
    except Exception as error:  # a damaged pickle raises whatever its bytes happen to ask for
        raise _unreadable(path, error) from None


def load_torch(source: Path | bytes, *, path: Path) -> Any:
    """What `torch.save` wrote, by torch's own weights-only reader, on the CPU.

    Nothing in it is compressed, for torch never does that, so a small file cannot become a large object.

    Args:
        source: a file, whose tensors are then mapped and not read before they are used; or the bytes of one.
        path: the file to name in errors.

    Raises:
        CheckpointError: it asks for a name that is not listed, or is damaged; bytes are held against their checksums.
    """
    try:
        _check_archive(_opened(source), with_sums=isinstance(source, bytes))
        with _nobody_elses_list():
            for name in torch.serialization.get_unsafe_globals_in_checkpoint(_opened(source)):
                stand_in = _stand_in(name)
                if stand_in is None:
                    raise _UnlistedError(name)
                torch.serialization.add_safe_globals([(stand_in, name)])
            mapped = isinstance(source, Path)
            return torch.load(_opened(source), map_location="cpu", weights_only=True, mmap=mapped)
    except _UnlistedError as error:
        raise _refused(str(error), path) from None
    except Exception as error:
        raise _unreadable(path, error) from None


_ONE_AT_A_TIME = threading.Lock()


@contextmanager
def _nobody_elses_list() -> Iterator[None]:
    """torch keeps one list of further names for the whole process, of all its threads, and Megatron adds to it."""
    with _ONE_AT_A_TIME:
        kept = torch.serialization.get_safe_globals()
        torch.serialization.clear_safe_globals()
        try:
            yield
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(kept)


def _opened(source: Path | bytes) -> Any:
    return io.BytesIO(source) if isinstance(source, bytes) else str(source)


def _check_archive(source: Any, *, with_sums: bool) -> None:
    """torch writes a checksum with every record and does not look at it when it reads."""
    with zipfile.ZipFile(source) as archive:
        records = archive.infolist()
        for record in records:
            if record.compress_type != zipfile.ZIP_STORED:
                raise zipfile.BadZipFile(f"{record.filename} is compressed")
        if archive.fp is not None and sum(record.file_size for record in records) > archive.fp.seek(0, io.SEEK_END):
            raise zipfile.BadZipFile("its records overlap")
        _check_pickles(archive)
        broken = archive.testzip() if with_sums else None
    if broken is not None:
        raise zipfile.BadZipFile(f"the checksum of {broken} does not match")


def _check_pickles(archive: zipfile.ZipFile) -> None:
    """torch's reader would make a bytearray of any length that is asked for, and hash any key."""
    for record in archive.infolist():
        if record.filename.endswith("data.pkl"):
            data = archive.read(record)
            if found := get_globals_in_pkl(io.BytesIO(data)) & {"builtins.bytearray", "__builtin__.bytearray"}:
                raise _UnlistedError(min(found))  # no checkpoint holds one
            _Weighing(io.BytesIO(data), length=len(data)).load()
