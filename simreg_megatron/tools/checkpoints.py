# SPDX-License-Identifier: Apache-2.0
"""Find the folder of a checkpoint, read its pickles, and make folders that appear only when they are complete.

A pickle names what it calls. Those of a checkpoint are read here, neither by torch nor by Megatron, and nothing that
they name is looked up: each object is a record of what it was given, and a name that no Megatron checkpoint has is
refused. Tensors are read by torch with `weights_only=True`.
"""

import argparse
import io
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, NoReturn

from simreg_megatron.notices import SentenceError

TRACKER = "latest_checkpointed_iteration.txt"
_KNOWN = re.compile(
    r"(builtins|__builtin__)\.(set|frozenset|complex|bytes)|_codecs\.encode|collections\.OrderedDict|_?io\.BytesIO"
    r"|argparse\.Namespace|types\.SimpleNamespace|datetime\.timedelta|signal\.(Signals|SIG[A-Z0-9]+)"
    r"|pathlib\.(_local\.)?(Posix)?Path|numpy\.(ndarray|dtype|dtypes\.\w+DType)"
    r"|numpy\._?core\.multiarray\.(_reconstruct|scalar)|torch\._utils\._rebuild_(tensor|tensor_v2|parameter)"
    r"|torch\.(Size|device|\w+Storage|storage\.(Untyped|Typed)Storage|serialization\._get_layout)"
    r"|torch\.(bool|bfloat16|u?int(8|16|32|64)|complex(64|128)|float(16|32|64|8_\w+))"
    r"|torch\.distributed\.checkpoint\.(filesystem\._StorageInfo|planner\.(SavePlan|\w*Write(Data|Item|ItemType)))"
    r"|torch\.distributed\.(checkpoint|_shard\.sharded_tensor)\.metadata\.(_?MEM_FORMAT_ENCODING|TensorProperties"
    r"|StorageMeta|Metadata(Index)?|(Bytes|Chunk|Tensor)StorageMetadata)"
    r"|megatron\.core\.((transformer\.)?enums\.[A-Z]\w+|rerun_state_machine\.Rerun(Diagnostic|Mode|State))"
    r"|megatron\.core\.dist_checkpointing\.strategies\.torch\.MCore(Metadata|SavePlan)"
    r"|megatron\.core\.optimizer(\.optimizer_config)?\.OptimizerConfig"
    r"|transformer_engine\.common\.recipe\.(_?Format\w*|\w+Scaling|(MM|Q)Params)"
)
_COMMON = "common_state/shard_0_1"  # since release 0.19, in the place of common.pt


class CheckpointError(SentenceError):
    """A checkpoint, model or option that cannot be used."""


def checkpoint_folder(load: Path, step: int | None = None) -> Path:
    """Name the checkpoint that Megatron's --load and --ckpt-step do; the newest one if `step` is None."""
    if not load.is_dir():
        raise CheckpointError(f"there is no folder {load}: give the one that --save named")
    load = load / "checkpoints" if (load / "checkpoints" / TRACKER).is_file() else load  # of a run's --output
    tracker = load / TRACKER
    if step is None and not tracker.is_file():
        return load
    name = tracker.read_text(errors="replace").strip() if step is None else str(step)
    if not (name.isdecimal() or (step is None and name == "release")):
        raise CheckpointError(f"{load} has no checkpoint {name!r}: give --ckpt-step N of a complete one")
    return load / (f"iter_{int(name):07d}" if name.isdecimal() else "release")


def refuse_taken(save: Path) -> None:
    if save.exists() and (not save.is_dir() or any(save.iterdir())):
        raise CheckpointError(f"{save} already exists: name a new folder, or remove it first")


@contextmanager
def new_folder(save: Path) -> Iterator[Path]:
    """Yield a folder that becomes `save` at the end; after an error or a stop nothing is left of it."""
    save = save.resolve()
    refuse_taken(save)
    save.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{save.name}.", dir=save.parent) as temporary:
        (made := Path(temporary, save.name)).mkdir()
        yield made
        made.replace(save)


@contextmanager
def one_sentence(folder: Path) -> Iterator[None]:
    """Turn errors of any type, as damaged files raise in pickle, torch and transformers, into a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[-1]
        raise CheckpointError(f"{folder} cannot be read ({type(error).__name__}: {reason}): copy it again") from None


class Stored(NamedTuple):
    """An entry of a checkpoint: a tensor's type, shape and parts. Of any other object it has the parts alone."""

    dtype: Any
    shape: list[int]
    parts: list[tuple[list[int], str, int, int]]  # offsets in the tensor; file, and offset and length in it


def read_metadata(folder: Path) -> dict[str, Stored]:
    """Read `.metadata`: what the folder of one checkpoint holds, by key."""
    import torch

    metadata = read_pickle((path := folder / ".metadata").read_bytes(), str(path)).state
    stored: dict[str, Stored] = {}
    for key, entry in metadata["state_dict_metadata"].items():
        stored[key] = Stored(None, [], [])
        if type(entry).__name__.endswith(".TensorStorageMetadata"):
            dtype = getattr(torch, entry.state["properties"].state[0].__name__.removeprefix("torch."))
            stored[key] = Stored(dtype, _numbers(entry.state["size"], 1), [])
    for index, info in metadata["storage_data"].items():
        key, offsets = index.state["fqn"], index.state.get("offset")
        file, at, length = (info.state[name] for name in ("relative_path", "offset", "length"))
        if not re.fullmatch(r"[\w.-]+\.distcp", file):
            raise CheckpointError(f"{path} points outside its folder, to {file}")
        if key in stored:
            stored[key].parts.append(([] if offsets is None else _numbers(offsets, 0), file, at, length))
    return stored


def _numbers(size: Any, least: int) -> list[int]:
    """Return the numbers of a torch.Size; ValueError if one is less than `least`."""
    (numbers,) = size.arguments
    if not all(type(number) is int and number >= least for number in numbers):
        raise ValueError("a tensor has a wrong size")
    return list(numbers)


def read_arguments(folder: Path, stored: Mapping[str, Stored]) -> argparse.Namespace:
    """Read Megatron's arguments; one that is not a plain value becomes the text "an object"."""
    common: dict[str, Any] = {}
    if (path := folder / "common.pt").is_file():
        common = read_pickle(_pickle_in(path.read_bytes()), str(path))
    elif _COMMON in stored:
        (common,) = read_pickle(_pickle_in(_bytes_of(folder, stored[_COMMON].parts[0])), f"{folder} ({_COMMON})")
    if (args := common.get("args")) is None:
        raise CheckpointError(f"{folder} has no arguments: Megatron's training loop did not save it")
    plain = {name: value if _is_plain(value) else "an object" for name, value in args.state.items()}
    return argparse.Namespace(**plain)


def _is_plain(value: Any) -> bool:
    if type(value) is list:
        return len(value) < 10_000 and all(type(each) is not list and _is_plain(each) for each in value)
    is_short = len(value) < 10_000 if type(value) is str else type(value) is not int or abs(value) < 2**63
    return value is None or (type(value) in (bool, int, float, str) and is_short)


def read_tensor(folder: Path, stored: Stored) -> Any:
    """Read all parts of a tensor; what no part holds is NaN."""
    import torch

    tensor = torch.full(stored.shape, torch.nan, dtype=stored.dtype)
    for part in stored.parts:
        _pickle_in(data := _bytes_of(folder, part))  # refuses what is compressed
        rows = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        tensor[tuple(slice(at, at + size) for at, size in zip(part[0], rows.shape, strict=True))] = rows
    return tensor


def _bytes_of(folder: Path, part: tuple[list[int], str, int, int]) -> bytes:
    _, file, at, length = part
    if not (path := folder / file).is_file():  # a pipe or a device would never end
        raise ValueError(f"there is no file {file}")
    with path.open("rb") as stream:
        stream.seek(at)
        return stream.read(length)


def _pickle_in(archive: bytes) -> bytes:
    """Return the pickle in what `torch.save` wrote; ValueError if anything is compressed, as torch never does."""
    with zipfile.ZipFile(io.BytesIO(archive)) as entries:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.infolist()):
            raise ValueError("its archive is compressed")
        (name,) = (name for name in entries.namelist() if name.endswith("data.pkl"))
        return entries.read(name)


def read_pickle(data: bytes, where: str) -> Any:
    """Read one pickle; raise a CheckpointError, which says `where`, for a name that is not listed."""
    reader = _Reader(io.BytesIO(data))
    reader.where = where
    return reader.load()


class _Reader(pickle._Unpickler):  # in Python: that in C reserves gigabytes for a few bytes
    where: str
    dispatch = {code: load for code, load in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]}  # noqa: RUF012

    def persistent_load(self, pid: Any) -> Any:  # a tensor's numbers
        return _Record()

    def find_class(self, module: str, name: str) -> Any:
        if not _KNOWN.fullmatch(path := f"{module}.{name}"):
            _refuse(self.where, path)
        return type(path, (_Record,), {})


class _Record:
    """What stands for an object: the arguments it was called with, and its state."""

    arguments: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *arguments: Any) -> Any:
        record = super().__new__(cls)
        record.arguments = arguments
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, *item: Any) -> None:
        pass

    append = extend = add = __setitem__


def _refuse(where: str, name: str) -> NoReturn:
    advice = "nothing was run; get the checkpoint from where it was trained"
    raise CheckpointError(f"{where} names {name}, which no Megatron checkpoint needs and may run code: {advice}")
