# SPDX-License-Identifier: Apache-2.0
"""No code in a checkpoint runs: a pickle that names any function beyond the list ends the export in one sentence."""

from __future__ import annotations

import argparse
import copyreg
import io
import os
import pickle
import signal
from pathlib import Path

import pytest
import torch

from simreg_megatron import cli
from simreg_megatron.tools.checkpoints import CheckpointError, check_archive, check_checkpoint, check_pickle
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


STATE = "decoder.layers.mlp.linear_fc1._extra_state/shard_0_2"


def test_a_sound_checkpoint_passes(checkpoint: Path) -> None:
    check_checkpoint(checkpoint)


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


def test_an_object_that_looks_like_a_tensor(checkpoint: Path, sprung: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Attributes of an entry are the file's; torch goes by its class."""
    replaced(checkpoint, STATE, [touches(sprung)])
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    vars(metadata.state_dict_metadata[STATE]).update(chunks=[], size=(1,), properties=None)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
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
        check_pickle(pickle.dumps(function, protocol), "it")


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
        check_pickle(crafted, "it")
    with pytest.raises(ValueError, match="unregistered extension code 1"):
        check_pickle(b"\x82\x01.", "it")
    with pytest.raises(TypeError):  # a class takes no state
        check_pickle(b"\x80\x02cargparse\nNamespace\nctorch\nSize\n)Rb.", "it")


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize("is_archive", [True, False])
def test_a_pickle_inside_of_a_state(is_archive: bool, protocol: int, sprung: Path) -> None:
    """Transformer Engine unpickles what its layers' BytesIO hold."""
    trap = touches(sprung)
    inner = archive_of(trap).getvalue() if is_archive else pickle.dumps(trap, protocol)
    with pytest.raises(CheckpointError, match=r"posix\.system"):
        check_pickle(pickle.dumps([io.BytesIO(inner)], max(2, protocol)), "it")
    with pytest.raises(CheckpointError, match=r"posix\.system"):
        check_archive(archive_of([io.BytesIO(inner)]).getvalue(), "it")
    with pytest.raises(CheckpointError, match=r"posix\.system"):  # after another pickle
        check_pickle(pickle.dumps(io.BytesIO(pickle.dumps(1) + pickle.dumps(trap))), "it")
    numbers = Calls(bytes, list(inner))
    with pytest.raises(CheckpointError, match=r"posix\.system"):
        check_pickle(pickle.dumps(Calls(io.BytesIO, numbers), protocol), "it")
    if protocol == 0 and not is_archive:  # as a string of Python 2
        as_bytes = b"c_codecs\nencode\n(T" + len(inner).to_bytes(4, "little") + inner + b"Vlatin1\ntR"
        with pytest.raises(CheckpointError, match=r"posix\.system"):
            check_pickle(b"cio\nBytesIO\n(" + as_bytes + b"tR.", "it")


@pytest.mark.parametrize("content", [b"", archive_of({"scale": torch.ones(2)}).getvalue(), pickle.dumps({"a": 1})])
def test_states_that_are_sound(content: bytes, checkpoint: Path) -> None:
    replaced(checkpoint, STATE, [io.BytesIO(content)])
    check_checkpoint(checkpoint)


def test_what_megatron_saves_is_listed(checkpoint: Path) -> None:
    """Values that arguments and other state of releases 0.12 to 0.19 have."""
    numpy = pytest.importorskip("numpy")
    values = [signal.SIGTERM, checkpoint, torch.bfloat16, torch.Size([2]), {1}, b"x", argparse.Namespace(a=1j)]
    for protocol in (2, 4):
        check_pickle(pickle.dumps([*values, numpy.random.get_state()], protocol), "it")


def test_a_path_out_of_the_folder(checkpoint: Path) -> None:
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../../etc/passwd"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="points outside its folder"):
        check_checkpoint(checkpoint)


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_what_is_cut_off(name: str, checkpoint: Path) -> None:
    content = (checkpoint / name).read_bytes()
    (checkpoint / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        check_checkpoint(checkpoint)


def test_an_object_in_the_data_file(checkpoint: Path, sprung: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replaced(checkpoint, STATE, [touches(sprung)])
    refused(checkpoint, capsys)
    assert not sprung.exists()


def test_experts_are_as_safe(tmp_path: Path, sprung: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = dist_checkpoint(tmp_path / "experts", tiny_config(experts=4))
    replaced(checkpoint, "decoder.layers.mlp.experts.experts.linear_fc2._extra_state/shard_1.3_2.4", [touches(sprung)])
    refused(checkpoint, capsys)
    assert not sprung.exists()
