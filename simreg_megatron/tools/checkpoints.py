# SPDX-License-Identifier: Apache-2.0
"""Find the folder of a checkpoint, check its pickles, and make folders that appear only when they are complete.

A pickle names what it calls. Before torch or Megatron loads one, the names are read without executing anything and
compared with a list of those that Megatron's checkpoints need. Tensors need no check: torch reads them with
`weights_only=True`.
"""

import codecs
import io
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from simreg_megatron.notices import SentenceError

TRACKER = "latest_checkpointed_iteration.txt"
_ALLOWED = re.compile(
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


def check_checkpoint(folder: Path) -> None:
    """Check every pickle in the folder of one checkpoint; raise a CheckpointError if one is unsafe or unreadable."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    path = folder / ".metadata"
    try:
        content = path.read_bytes()
        check_pickle(content, str(path))
        metadata = pickle.loads(content)  # noqa: S301
        for index, place in metadata.storage_data.items():
            path = folder / place.relative_path
            if path.parent != folder:
                raise CheckpointError(f"{folder}/.metadata points outside its folder, to {place.relative_path}")
            if type(metadata.state_dict_metadata.get(index.fqn)) is not TensorStorageMetadata:
                with path.open("rb") as stream:
                    stream.seek(place.offset)
                    check_archive(stream.read(place.length), f"{path} ({index.fqn})")
        if (path := folder / "common.pt").is_file():
            check_archive(path.read_bytes(), str(path))
    except (SentenceError, OSError):
        raise
    except Exception as error:  # damaged bytes make pickle and torch raise errors of any type
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error}): copy it again") from None


def check_archive(data: bytes, where: str) -> None:
    """Check the pickle in what `torch.save` wrote, read from the archive as `torch.load` does."""
    import torch

    reader = torch._C.PyTorchFileReader(io.BytesIO(data))
    if "constants.pkl" in reader.get_all_records():
        _refuse(where, "TorchScript code")
    check_pickle(reader.get_record("data.pkl"), where)


def check_pickle(data: bytes, where: str) -> None:
    """Check the names in pickles that follow each other, and in those of their `io.BytesIO`; errors say `where`."""
    stream = io.BytesIO(data)
    in_streams: list[Any] = []
    while stream.tell() < len(data):
        reader = _Reader(stream)
        reader.where, reader.in_streams = where, in_streams
        reader.load()
    for value in in_streams:
        content = value[0] if isinstance(value, tuple) else value  # a BytesIO is made of bytes, or of a state with them
        if not isinstance(content, bytes):
            _refuse(where, f"a BytesIO of {type(content).__name__}")
        if content:
            (check_archive if content.startswith(b"PK") else check_pickle)(content, where)


class _Reader(pickle.Unpickler):
    """Read a pickle without its objects: each name, if it is allowed, stands for a class that does nothing."""

    where: str
    in_streams: list[Any]

    def persistent_load(self, pid: Any) -> Any:
        return _Stub()

    def find_class(self, module: str, name: str) -> Any:
        if not _ALLOWED.fullmatch(f"{module}.{name}"):
            _refuse(self.where, f"{module}.{name}")
        if name == "BytesIO":
            return type("BytesIO", (_Stub,), {"values": self.in_streams})
        return {"bytes": bytes, "encode": codecs.encode}.get(name, _Stub)  # by which contents of a BytesIO are made


class _Stub:
    """Take every value that an object of a pickle is given, and keep it only in the place of a BytesIO."""

    values: list[Any] | None = None

    def __new__(cls, *values: Any, **named: Any) -> Any:
        (stub := super().__new__(cls)).keep(*values, *named.values())
        return stub

    def keep(self, *values: Any) -> None:
        if self.values is not None:
            self.values += values

    def __setstate__(self, state: Any) -> None:  # of an instance: for a class, pickle passes the state alone
        self.keep(state)

    __setitem__ = append = extend = add = keep


def _refuse(where: str, name: str) -> NoReturn:
    advice = "nothing was run; get the checkpoint from where it was trained"
    raise CheckpointError(f"{where} names {name}, which no Megatron checkpoint needs and may run code: {advice}")
