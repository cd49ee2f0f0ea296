# SPDX-License-Identifier: Apache-2.0
"""No code in a checkpoint runs: a pickle that names any function beyond the list ends the export in one sentence."""

from __future__ import annotations

import argparse
import collections
import copy
import copyreg
import io
import os
import pickle
import signal
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from simreg_megatron import cli
from simreg_megatron.tools.checkpoints import CheckpointError, read_arguments, read_metadata, read_pickle
from tests.helpers.checkpoints import Calls, archive_of, dist_checkpoint, tiny_config

pytest.importorskip("transformers")
pytest.importorskip("megatron")  # the name alone: importing its core takes seconds of every worker


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return dist_checkpoint(tmp_path / "checkpoint")


@pytest.fixture
def sprung(tmp_path: Path) -> Path:
    return tmp_path / "sprung"


def touches(path: Path) -> Calls:
    return Calls(os.system, f"touch {path}")


def refused(checkpoint: Path, capsys: pytest.CaptureFixture[str], name: str = "posix.system") -> None:
    """The export ends with one sentence that has the name; nothing is written."""
    before = sorted(checkpoint.parent.iterdir())
    assert cli.main(["export-hf", "--load", str(checkpoint), "--save", str(checkpoint.parent / "model")]) == 2
    (sentence,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    assert f"names {name}, which no Megatron checkpoint needs" in sentence
    assert sorted(checkpoint.parent.iterdir()) == before


def replaced(checkpoint: Path, key: str, content: object) -> None:
    """Put another archive in the place of an entry, at the end of the data file."""
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    index = next(index for index in metadata.storage_data if index.fqn == key)
    data, archive = checkpoint / metadata.storage_data[index].relative_path, archive_of(content).getvalue()
    metadata.storage_data[index].offset, metadata.storage_data[index].length = data.stat().st_size, len(archive)
    data.write_bytes(data.read_bytes() + archive)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("protocol", range(6))
def test_metadata_that_would_run_code_is_refused(
    protocol: int, checkpoint: Path, sprung: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trap = pickle.dumps(touches(sprung), protocol)
    pickle.loads(trap)
    assert sprung.exists(), "the trap would go off"
    sprung.unlink()
    (checkpoint / ".metadata").write_bytes(trap)
    refused(checkpoint, capsys)
    assert not sprung.exists()


def test_common_state_that_would_run_code_is_refused(
    checkpoint: Path, sprung: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"args": argparse.Namespace(), "x": touches(sprung)}, checkpoint / "common.pt")
    refused(checkpoint, capsys)
    assert not sprung.exists()


def test_a_tensor(checkpoint: Path, sprung: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In files of tensors, torch itself refuses code."""
    replaced(checkpoint, "output_layer.weight", touches(sprung))
    assert cli.main(["export-hf", "--load", str(checkpoint), "--save", str(checkpoint.parent / "model")]) == 2
    assert "cannot be read" in capsys.readouterr().err and not sprung.exists()


@pytest.mark.parametrize("function", [eval, exec, getattr, __import__, open, copyreg._reconstructor, torch.load])
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_any_other_name(function, protocol: int) -> None:
    with pytest.raises(CheckpointError, match="no Megatron checkpoint needs"):
        read_pickle(pickle.dumps(function, protocol), "it")


@pytest.mark.parametrize(
    ("crafted", "name"),
    [
        # The module is pushed once, and both names are taken from the memo.
        (b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x940h\x00h\x01\x93.", "posix.system"),
        (b"\x80\x04\x8c\x05posixq\x07\x8c\x06systemr\x08\x00\x00\x000h\x07j\x08\x00\x00\x00\x93.", "posix.system"),
        (b"\x80\x04Vposix\np1\nVsystem\np2\n0g1\ng2\n\x93.", "posix.system"),
        # A harmless string lies on top, and is taken away again.
        (b"\x80\x04\x8c\x05posix\x8c\x06system\x8c\x04Size0\x93.", "posix.system"),
        (b"\x80\x04\x8c\x05torch\x8c\x0eSize.__class__\x93.", "torch.Size.__class__"),
        (b"(S'id'\niposix\nsystem\n.", "posix.system"),
        (b"ctransformer_engine.common.recipe\ndataclass\n.", r"transformer_engine\.common\.recipe\.dataclass"),
    ],
)
def test_names_that_are_hidden(crafted: bytes, name: str) -> None:
    """STACK_GLOBAL through the memo, INST, extension codes, and an attribute of a listed class."""
    with pytest.raises(CheckpointError, match=f"names {name}, which"):
        read_pickle(crafted, "it")
    with pytest.raises(ValueError, match="unregistered extension code 1"):
        read_pickle(b"\x82\x01.", "it")
    with pytest.raises(TypeError):  # a class takes no state
        read_pickle(b"\x80\x02cargparse\nNamespace\nctorch\nSize\n)Rb.", "it")


def test_what_megatron_saves_is_listed(checkpoint: Path) -> None:
    """Values that arguments and other state of releases 0.12 to 0.19 have."""
    numpy = pytest.importorskip("numpy")
    values = [signal.SIGTERM, checkpoint, torch.bfloat16, torch.Size([2]), {1}, b"x", argparse.Namespace(a=1j)]
    for protocol in (2, 4):
        read_pickle(pickle.dumps([*values, numpy.random.get_state()], protocol), "it")


def test_a_path_out_of_the_folder(checkpoint: Path) -> None:
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../../etc/passwd"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="points outside its folder"):
        read_metadata(checkpoint)


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_what_is_cut_off(name: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = (checkpoint / name).read_bytes()
    (checkpoint / name).write_bytes(content[: len(content) // 2])
    assert cli.main(["export-hf", "--load", str(checkpoint), "--save", str(checkpoint.parent / "model")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def as_entry(checkpoint: Path, archive: bytes) -> Any:
    """Move the common state to the end of a data file, where release 0.19 has it; return the metadata."""
    (checkpoint / "common.pt").unlink()
    metadata, key = pickle.loads((checkpoint / ".metadata").read_bytes()), "common_state/shard_0_1"
    place = copy.copy(next(iter(metadata.storage_data.values())))
    data = checkpoint / place.relative_path
    place.offset, place.length = data.stat().st_size, len(archive)
    data.write_bytes(data.read_bytes() + archive)
    metadata.state_dict_metadata[key], metadata.storage_data[MetadataIndex(key)] = BytesStorageMetadata(), place
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    return metadata


def test_a_pickle_in_front_of_the_archive(checkpoint: Path, sprung: Path) -> None:
    """torch.load takes the front for its older format; what is read here is what was looked at."""
    common, trap = torch.load(checkpoint / "common.pt", weights_only=False), pickle.dumps(touches(sprung))
    with zipfile.ZipFile(archive_of([common])) as sound, zipfile.ZipFile(both := io.BytesIO(trap), "a") as archive:
        for entry in sound.infolist():
            archive.writestr(entry.filename, sound.read(entry))
    as_entry(checkpoint, both.getvalue())
    with suppress(Exception):
        torch.load(io.BytesIO(both.getvalue()), weights_only=False)
    assert sprung.exists(), "the trap would go off"
    sprung.unlink()
    assert cli.main(["export-hf", "--load", str(checkpoint), "--save", str(checkpoint.parent / "model")]) == 0
    assert not sprung.exists()


def test_a_table_that_hides_its_entries(checkpoint: Path, sprung: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An attribute of the instance stands in front of OrderedDict.items."""
    metadata = as_entry(checkpoint, archive_of([touches(sprung)]).getvalue())
    refused(checkpoint, capsys)
    pairs = list(metadata.storage_data.items())
    metadata.storage_data = Calls(collections.OrderedDict)
    metadata.storage_data.call = (collections.OrderedDict, (), {"items": collections.OrderedDict}, None, iter(pairs))
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(AttributeError, match="has no attribute 'items'"):
        read_metadata(checkpoint)


def test_no_object_is_made(checkpoint: Path) -> None:
    """Not even one of a class that is harmless: its attributes may not be."""
    numpy = pytest.importorskip("numpy")
    address = Calls(numpy.dtype, "V8", False, True)  # the bytes of such an array would be taken for objects
    address.call += ((3, "|", None, ("a",), {"a": (numpy.dtype("O"), 0)}, 8, 1, 0),)
    values = [address, [[1]], 10**99, "x" * 10**5, torch.float32, signal.SIGTERM, {"a": 1}]
    args = argparse.Namespace(**{f"value{number}": value for number, value in enumerate(values)}, hidden_size=3)
    as_entry(checkpoint, archive_of([{"args": args}]).getvalue())
    found = vars(read_arguments(checkpoint, read_metadata(checkpoint)))
    assert found.pop("hidden_size") == 3 and set(found.values()) == {"an object"} and len(found) == len(values)
    key = next(iter(pickle.loads((checkpoint / ".metadata").read_bytes()).storage_data))
    assert type(read_pickle(pickle.dumps(key), "it")).__bases__[0].__name__ == "_Record"


def test_small_files_do_not_fill_memory(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert read_pickle(b"\x80\x02Nr" + (2**32 - 1).to_bytes(4, "little") + b".", "it") is None, "place 2^32 of the memo"
    with pytest.raises(KeyError):
        read_pickle(b"\x80\x05\x96" + (2**40).to_bytes(8, "little") + b".", "it")
    with zipfile.ZipFile(checkpoint / "common.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(bytes(10**6)))
    assert cli.main(["export-hf", "--load", str(checkpoint), "--save", str(checkpoint.parent / "model")]) == 2
    assert "its archive is compressed" in capsys.readouterr().err


def test_objects_in_the_data_files_are_not_read(tmp_path: Path, sprung: Path) -> None:
    checkpoint = dist_checkpoint(tmp_path / "experts", tiny_config(experts=4))
    replaced(checkpoint, "decoder.layers.mlp.experts.experts.linear_fc2._extra_state/shard_1.3_2.4", [touches(sprung)])
    assert cli.main(["export-hf", "--load", str(checkpoint), "--save", str(tmp_path / "model")]) == 0
    assert not sprung.exists()
