# SPDX-License-Identifier: Apache-2.0
"""Find the folder of a checkpoint, read its pickles, and make folders that appear only when they are complete.

A pickle names what it calls. Those of a checkpoint are read here, neither by torch nor by Megatron: a name of a class
that is needed is looked up, one that Megatron's checkpoints have besides stands for an object that does nothing, and
any other one is refused. Tensors are read by torch with `weights_only=True`.
"""

import io
import pickle
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from simreg_megatron.notices import SentenceError

TRACKER = "latest_checkpointed_iteration.txt"
_NEEDED = re.compile(
    r"(builtins|__builtin__)\.(set|frozenset|complex)|collections\.OrderedDict|argparse\.Namespace"
    r"|torch\.(Size|serialization\._get_layout|bool|bfloat16|u?int(8|16|32|64)|complex(64|128)|float(16|32|64|8_\w+))"
    r"|torch\.distributed\.checkpoint\.filesystem\._StorageInfo"
    r"|torch\.distributed\.(checkpoint|_shard\.sharded_tensor)\.metadata\.(_?MEM_FORMAT_ENCODING|TensorProperties"
    r"|StorageMeta|Metadata(Index)?|(Bytes|Chunk|Tensor)StorageMetadata)"
)
_KNOWN = re.compile(
    r"(builtins|__builtin__)\.bytes|_codecs\.encode|_?io\.BytesIO|types\.SimpleNamespace|datetime\.timedelta"
    r"|signal\.(Signals|SIG[A-Z0-9]+)|pathlib\.(_local\.)?(Posix)?Path|numpy\.(ndarray|dtype|dtypes\.\w+DType)"
    r"|numpy\._?core\.multiarray\.(_reconstruct|scalar)|torch\._utils\._rebuild_(tensor|tensor_v2|parameter)"
    r"|torch\.(device|\w+Storage|storage\.(Untyped|Typed)Storage)"
    r"|torch\.distributed\.checkpoint\.planner\.(SavePlan|\w*Write(Data|Item|ItemType))"
    r"|megatron\.core\.((transformer\.)?enums\.[A-Z]\w+|rerun_state_machine\.Rerun(Diagnostic|Mode|State))"
    r"|megatron\.core\.dist_checkpointing\.strategies\.torch\.MCoreSavePlan"
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


def read_metadata(folder: Path) -> Any:
    """Read `.metadata`: which tensors the folder of one checkpoint holds, and where."""
    from torch.distributed.checkpoint.metadata import Metadata

    metadata = read_pickle((path := folder / ".metadata").read_bytes(), str(path))
    tables = [getattr(metadata, name, None) for name in ("storage_data", "state_dict_metadata")]
    if type(metadata) is not Metadata or [type(table) for table in tables] != [dict, dict]:
        raise CheckpointError(f"{path} is no torch_dist checkpoint's")
    for place in metadata.storage_data.values():
        if not re.fullmatch(r"[\w.-]+\.distcp", place.relative_path):
            raise CheckpointError(f"{path} points outside its folder, to {place.relative_path}")
    return metadata


def read_common(folder: Path, metadata: Any) -> Any:
    """Read what a checkpoint holds besides tensors, from common.pt or, since release 0.19, an entry of a data file."""
    if (path := folder / "common.pt").is_file():
        return _read_archive(path.read_bytes(), str(path))
    (place,) = (place for index, place in metadata.storage_data.items() if index.fqn == "common_state/shard_0_1")
    with (path := folder / place.relative_path).open("rb") as stream:
        stream.seek(place.offset)
        return _read_archive(stream.read(place.length), f"{path} (common_state)")[0]


def _read_archive(data: bytes, where: str) -> Any:
    """Read the pickle in what `torch.save` wrote, without its tensors."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        (entry,) = (entry for entry in archive.infolist() if entry.filename.endswith("data.pkl"))
        if entry.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(f"{where} is compressed, which torch does not do")
        return read_pickle(archive.read(entry), where)


def read_pickle(data: bytes, where: str) -> Any:
    """Read one pickle; raise a CheckpointError, which says `where`, for a name that is not listed."""
    reader = _Reader(io.BytesIO(data))
    reader.where = where
    return reader.load()


class _Reader(pickle._Unpickler):  # in Python: that in C reserves gigabytes for a few bytes
    where: str

    def persistent_load(self, pid: Any) -> Any:  # a tensor's numbers
        return _Nothing()

    def find_class(self, module: str, name: str) -> Any:
        if (path := f"{module}.{name}") == "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata":
            module, name = "torch.distributed.checkpoint.metadata", "Metadata"  # its base
        elif _KNOWN.fullmatch(path):
            return _Nothing
        elif not _NEEDED.fullmatch(path):
            _refuse(self.where, path)
        return super().find_class(module, name)

    def load_build(self) -> None:
        if isinstance(self.stack[-2], type):  # type: ignore[attr-defined]
            _refuse(self.where, f"attributes of {self.stack[-2].__name__}")  # type: ignore[attr-defined]
        super().load_build()  # type: ignore[misc]

    dispatch = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}  # type: ignore[dict-item]  # noqa: RUF012


class _Nothing:
    """Take every value that an object of a pickle is given, and keep none."""

    def __new__(cls, *values: Any, **named: Any) -> Any:
        return super().__new__(cls)

    def __setstate__(self, *values: Any) -> None:
        pass

    __init__ = __setitem__ = append = extend = add = __setstate__


def _refuse(where: str, name: str) -> NoReturn:
    advice = "nothing was run; get the checkpoint from where it was trained"
    raise CheckpointError(f"{where} names {name}, which no Megatron checkpoint needs and may run code: {advice}")
