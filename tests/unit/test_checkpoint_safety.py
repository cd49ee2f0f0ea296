# SPDX-License-Identifier: Apache-2.0
"""Nothing in a checkpoint is run, and one that is malicious, cut off, changed or foreign is one sentence, no folder."""

from __future__ import annotations

import argparse
import contextlib
import copyreg
import io
import json
import os
import pickle
import shutil
import signal
import sys
import zipfile
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from simreg_megatron.checkpoint import appearing as appearing_module
from simreg_megatron.checkpoint import weights
from simreg_megatron.checkpoint.appearing import appearing
from simreg_megatron.checkpoint.dist_format import DistCheckpoint
from simreg_megatron.checkpoint.errors import CheckpointError
from simreg_megatron.checkpoint.pickles import Inert, load_pickle, load_torch
from simreg_megatron.checkpoint.source import open_checkpoint
from simreg_megatron.cli import app
from tests.fuzz.readers.checkpoints import archive_of, rank_content, with_pickle
from tests.helpers import jobs
from tests.helpers.checkpoints import EXPERTS, Calls, dist_checkpoint

pytest.importorskip("transformers")


def export(load: Path, save: Path):
    return CliRunner().invoke(app, ["export-hf", "--load", str(load), "--save", str(save)])


def refused(load: Path, save: Path) -> str:
    """The sentence with which the command ends; nothing may be written."""
    before = sorted(save.parent.iterdir())
    done = export(load, save)
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit), done.output
    assert sorted(save.parent.iterdir()) == before
    (sentence,) = (line for line in done.stderr.splitlines() if line)
    assert sentence.startswith("error: ")
    return sentence


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return dist_checkpoint(tmp_path / "checkpoint")


@pytest.fixture
def save(tmp_path: Path) -> Path:
    return tmp_path / "model"


def older_format(folder: Path, content: dict) -> Path:
    (folder / "mp_rank_00").mkdir(parents=True)
    torch.save(content, folder / "mp_rank_00" / "model_optim_rng.pt")
    return folder


def touches(path: Path) -> Calls:
    return Calls(os.system, f"touch {path}")


def test_a_sound_checkpoint_is_exported(checkpoint: Path, save: Path) -> None:
    done = export(checkpoint, save)
    assert done.exit_code == 0 and (save / "config.json").is_file(), done.output


def _shared_lists() -> list:
    """Small on disk, and 2^40 numbers long when it is printed."""
    lists: list = [1]
    for _ in range(40):
        lists = [lists, lists]
    return lists


class TestMalicious:
    def test_the_traps_of_these_tests_would_go_off(self, tmp_path: Path) -> None:
        pickle.loads(pickle.dumps(touches(tmp_path / "sprung")))
        assert (tmp_path / "sprung").exists()

    @pytest.mark.parametrize("protocol", [0, 2, 4])
    def test_metadata(self, checkpoint: Path, save: Path, tmp_path: Path, protocol: int) -> None:
        (checkpoint / ".metadata").write_bytes(pickle.dumps(touches(tmp_path / "sprung"), protocol))
        assert "asks for posix.system to be called" in refused(checkpoint, save)
        assert not (tmp_path / "sprung").exists()

    @pytest.mark.parametrize("function", [eval, exec, getattr, __import__, open, copyreg._reconstructor, torch.load])
    def test_any_other_name_in_metadata(self, checkpoint: Path, function) -> None:
        (checkpoint / ".metadata").write_bytes(pickle.dumps(function))
        with pytest.raises(CheckpointError, match="no Megatron checkpoint needs"):
            load_pickle(checkpoint / ".metadata")

    def test_a_name_reached_through_a_listed_one(self, checkpoint: Path) -> None:
        # STACK_GLOBAL with a dotted name: torch.Size.__class__ would be `type`
        crafted = b"\x80\x04\x8c\x05torch\x8c\x0eSize.__class__\x93."
        assert pickle.loads(crafted) is type
        (checkpoint / ".metadata").write_bytes(crafted)
        with pytest.raises(CheckpointError, match=r"torch\.Size\.__class__"):
            load_pickle(checkpoint / ".metadata")

    def test_the_common_state(self, checkpoint: Path, save: Path, tmp_path: Path) -> None:
        torch.save({"args": argparse.Namespace(), "x": touches(tmp_path / "sprung")}, checkpoint / "common.pt")
        assert "posix.system" in refused(checkpoint, save)
        assert not (tmp_path / "sprung").exists()

    def test_the_common_state_inside_the_data_file(self, checkpoint: Path, save: Path, tmp_path: Path) -> None:
        (checkpoint / "common.pt").unlink()
        add_object(checkpoint, "common_state/shard_0_1", [{"args": touches(tmp_path / "sprung")}])
        assert "posix.system" in refused(checkpoint, save)
        assert not (tmp_path / "sprung").exists()

    def test_a_tensor(self, checkpoint: Path, save: Path, tmp_path: Path) -> None:
        replace_chunk(checkpoint, "output_layer.weight", touches(tmp_path / "sprung"))
        assert "posix.system" in refused(checkpoint, save)
        assert not (tmp_path / "sprung").exists()

    def test_the_older_format(self, tmp_path: Path, save: Path) -> None:
        content = {"args": argparse.Namespace(), "model": touches(tmp_path / "sprung")}
        assert "posix.system" in refused(older_format(tmp_path / "old", content), save)
        assert not (tmp_path / "sprung").exists()

    def test_a_path_out_of_the_folder(self, checkpoint: Path, save: Path) -> None:
        metadata = read_metadata(checkpoint)
        for info in metadata.storage_data.values():
            info.relative_path = "../../etc/passwd"
        write_metadata(checkpoint, metadata)
        assert "points outside its folder" in refused(checkpoint, save)

    @pytest.mark.parametrize("key", [b")" + 400_000 * b"\x85", b")" + 100 * b"2\x86"], ids=["deep", "shared"])
    def test_a_key_that_hashing_would_not_survive(self, key: bytes, tmp_path: Path) -> None:
        """Tuples in tuples: so deep that Python's stack ends, or so often the same that the hash takes 2^100 steps."""
        crafted = b"\x80\x02}" + key + b"K\x01s."
        (tmp_path / ".metadata").write_bytes(crafted)
        with pytest.raises(CheckpointError, match="nested too deep"):
            load_pickle(tmp_path / ".metadata")
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_torch(with_pickle(archive_of({}), crafted), path=tmp_path / "common.pt")

    def test_the_same_long_key_again_and_again(self, tmp_path: Path) -> None:
        long = b"(" + 4000 * b"K\x01" + b"tq\x00"
        (tmp_path / ".metadata").write_bytes(b"\x80\x02}" + long + b"K\x01s" + 4000 * b"h\x00K\x01s" + b".")
        with pytest.raises(CheckpointError, match="too long to hash"):
            load_pickle(tmp_path / ".metadata")

    @pytest.mark.parametrize("value", [_shared_lists(), 10**6000, -(10**6000)], ids=["lists", "long", "negative"])
    @pytest.mark.parametrize("name", ["num_layers", "normalization", "rotary_base", "tensor_model_parallel_size"])
    def test_a_setting_that_printing_would_not_survive(self, name: str, value, tmp_path: Path, save: Path) -> None:
        content = rank_content()
        vars(content["args"])[name] = value
        refused(older_format(tmp_path / "old", content), save)

    @pytest.mark.parametrize("experts", [0, 3, "four", 10**6000], ids=["none", "three", "word", "long"])
    def test_experts_in_one_matrix_that_do_not_divide_it(self, experts, tmp_path: Path, save: Path) -> None:
        content = rank_content()
        content["model"]["decoder.layers.0.mlp.experts.weight1"] = torch.zeros(8, 4)
        vars(content["args"])["num_experts"] = experts
        refused(older_format(tmp_path / "old", content), save)

    def test_experts_without_end_are_counted_one_by_one(self) -> None:
        many = replace(EXPERTS, num_experts=1 << 39).shapes(num_rows=10)
        assert [name for name, _ in islice(many, 6)][-1] == weights.canonical(weights.ROUTER, 0)

    def test_classes_of_megatron_become_inert_records(self, checkpoint: Path) -> None:
        crafted = b"cmegatron.core.utils\nanything\n(S'rm -rf'\ntR."
        (checkpoint / ".metadata").write_bytes(crafted)
        found = load_pickle(checkpoint / ".metadata")
        assert isinstance(found, Inert) and found.arguments == ("rm -rf",)

    def test_what_another_library_allowed_is_not_allowed_here(self, tmp_path: Path) -> None:
        torch.save(touches(tmp_path / "sprung"), tmp_path / "file.pt")
        with torch.serialization.safe_globals([os.system]):
            with pytest.raises(CheckpointError, match=r"posix\.system"):
                load_torch(tmp_path / "file.pt", path=tmp_path / "file.pt")
            assert os.system in torch.serialization.get_safe_globals(), "the other library's list must stay"
        assert not (tmp_path / "sprung").exists()


class TestDamaged:
    @pytest.mark.parametrize("name", [".metadata", "common.pt", "metadata.json", "__0_0.distcp"])
    def test_cut_off(self, name: str, checkpoint: Path, save: Path) -> None:
        content = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(content[: len(content) // 2])
        if name == "metadata.json":  # its being there is what counts; Megatron writes it last
            assert export(checkpoint, save).exit_code == 0
        else:
            assert name in refused(checkpoint, save)

    @pytest.mark.parametrize("name", [".metadata", "common.pt", "metadata.json", "__0_0.distcp"])
    def test_missing(self, name: str, checkpoint: Path, save: Path) -> None:
        (checkpoint / name).unlink()
        assert name in refused(checkpoint, save)

    def test_a_flipped_bit(self, checkpoint: Path, save: Path) -> None:
        place = DistCheckpoint(checkpoint).tensors["output_layer.weight"].chunks[0].place
        content = bytearray(place.path.read_bytes())
        middle = place.start + place.length // 2
        content[middle] ^= 1
        place.path.write_bytes(bytes(content))
        assert "checksum" in refused(checkpoint, save) or "cannot be read" in refused(checkpoint, save)

    def test_records_that_share_their_bytes(self, tmp_path: Path) -> None:
        """A small file can hold any number of them, and each is read."""
        path = tmp_path / "many.pt"
        torch.save({"weight": torch.zeros(5000)}, path)
        assert load_torch(path, path=path)["weight"].shape == (5000,)
        with zipfile.ZipFile(path, "a") as archive:
            archive.filelist += [max(archive.filelist, key=lambda record: record.file_size)]
            archive.comment = b"so that the list is written again"
        with pytest.raises(CheckpointError, match="its records overlap"):
            load_torch(path, path=path)

    @pytest.mark.parametrize("content", [torch.zeros(3), torch.zeros(10, 16, dtype=torch.float64), "text"])
    def test_another_tensor_in_its_place(self, content, checkpoint: Path, save: Path) -> None:
        replace_chunk(checkpoint, "output_layer.weight", content)
        assert "does not hold the part of output_layer.weight" in refused(checkpoint, save)

    def test_a_layer_that_is_not_there(self, checkpoint: Path, save: Path) -> None:
        metadata = read_metadata(checkpoint)
        metadata.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"].chunks.pop()
        write_metadata(checkpoint, metadata)
        assert "with gaps or twice" in refused(checkpoint, save)

    def test_a_layer_written_over_another(self, checkpoint: Path, save: Path) -> None:
        metadata = read_metadata(checkpoint)
        chunks = metadata.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"].chunks
        chunks[1] = chunks[0]
        write_metadata(checkpoint, metadata)
        assert "with gaps or twice" in refused(checkpoint, save)

    def test_a_weight_that_is_not_there(self, checkpoint: Path, save: Path) -> None:
        metadata = read_metadata(checkpoint)
        del metadata.state_dict_metadata["decoder.final_layernorm.weight"]
        write_metadata(checkpoint, metadata)
        assert "has no decoder.final_layernorm.weight" in refused(checkpoint, save)

    def test_a_weight_too_many(self, checkpoint: Path, save: Path) -> None:
        metadata = read_metadata(checkpoint)
        extra = metadata.state_dict_metadata["decoder.final_layernorm.weight"]
        metadata.state_dict_metadata["decoder.final_layernorm.bias"] = extra
        where = {index.fqn: info for index, info in metadata.storage_data.items()}["decoder.final_layernorm.weight"]
        index = next(index for index in metadata.storage_data if index.fqn == "decoder.final_layernorm.weight")
        metadata.storage_data[type(index)("decoder.final_layernorm.bias", index.offset)] = where
        write_metadata(checkpoint, metadata)
        assert "decoder.final_layernorm.bias is no weight of a LLaMA" in refused(checkpoint, save)

    def test_numbers_that_are_none(self, checkpoint: Path, save: Path) -> None:
        replace_chunk(checkpoint, "output_layer.weight", torch.full((10, 16), float("nan")))
        assert "lm_head.weight holds NaN" in refused(checkpoint, save)

    def test_metadata_of_something_else(self, checkpoint: Path, save: Path) -> None:
        (checkpoint / ".metadata").write_bytes(pickle.dumps({"weights": [1, 2, 3]}))
        assert "it is not a checkpoint's" in refused(checkpoint, save)


class TestForeign:
    def test_no_folder(self, tmp_path: Path, save: Path) -> None:
        assert "there is no folder" in refused(tmp_path / "nowhere", save)

    def test_an_empty_folder(self, tmp_path: Path, save: Path) -> None:
        (tmp_path / "empty").mkdir()
        assert "holds no Megatron checkpoint" in refused(tmp_path / "empty", save)

    def test_another_format_of_megatron(self, tmp_path: Path, save: Path) -> None:
        (tmp_path / "zarr").mkdir()
        (tmp_path / "zarr" / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
        assert "in the format zarr" in refused(tmp_path / "zarr", save)
        for damaged in ("{", "[]"):
            (tmp_path / "zarr" / "metadata.json").write_text(damaged)
            assert "metadata.json is damaged: copy the checkpoint again" in refused(tmp_path / "zarr", save)

    def test_a_checkpoint_of_torch_alone(self, tmp_path: Path, save: Path) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save({"weight": torch.zeros(2)}, checkpoint_id=str(tmp_path / "dcp"))
        assert "no metadata.json" in refused(tmp_path / "dcp", save)

    def test_a_tracker_that_leads_nowhere(self, checkpoint: Path, tmp_path: Path, save: Path) -> None:
        shutil.move(checkpoint, tmp_path / "run" / "iter_0000005")
        (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("7")
        assert "has no iter_0000007; there: iter_0000005" in refused(tmp_path / "run", save)
        assert open_checkpoint(tmp_path / "run", 5).format == "torch_dist"
        (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("../iter_0000005")
        assert "does not hold a number of steps" in refused(tmp_path / "run", save)
        (tmp_path / "run" / "latest_checkpointed_iteration.txt").unlink()
        assert "iteration.txt: say which step to take with --ckpt-step" in refused(tmp_path / "run", save)

    def test_a_taken_name_is_left_alone(self, checkpoint: Path, save: Path) -> None:
        save.mkdir()
        (save / "precious").write_text("kept")
        assert "already exists" in refused(checkpoint, save)
        assert (save / "precious").read_text() == "kept"

    def test_no_arguments(self, checkpoint: Path, save: Path) -> None:
        torch.save({"iteration": 3}, checkpoint / "common.pt")
        assert "does not say with which arguments" in refused(checkpoint, save)


def test_experts_are_as_safe(tmp_path: Path, save: Path) -> None:
    checkpoint = dist_checkpoint(tmp_path / "experts", EXPERTS)
    replace_chunk(checkpoint, "decoder.layers.mlp.experts.experts.linear_fc1.weight", touches(tmp_path / "sprung"))
    assert "posix.system" in refused(checkpoint, save)
    assert not (tmp_path / "sprung").exists()


def read_metadata(checkpoint: Path):
    return pickle.loads((checkpoint / ".metadata").read_bytes())


def write_metadata(checkpoint: Path, metadata) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def append(checkpoint: Path, content) -> tuple[int, int]:
    """Write an archive at the end of the data file: where it begins and how long it is."""
    archive = io.BytesIO()
    torch.save(content, archive)
    path = checkpoint / "__0_0.distcp"
    start = path.stat().st_size
    with path.open("ab") as stream:
        stream.write(archive.getvalue())
    return start, archive.tell()


def replace_chunk(checkpoint: Path, key: str, content) -> None:
    metadata = read_metadata(checkpoint)
    index = next(index for index in metadata.storage_data if index.fqn == key)
    metadata.storage_data[index].offset, metadata.storage_data[index].length = append(checkpoint, content)
    write_metadata(checkpoint, metadata)


def add_object(checkpoint: Path, key: str, content) -> None:
    metadata = read_metadata(checkpoint)
    like = next(index for index in metadata.storage_data if "_extra_state" in index.fqn)
    info = metadata.storage_data[like]
    start, length = append(checkpoint, content)
    metadata.storage_data[type(like)(key)] = type(info)(info.relative_path, start, length)
    metadata.state_dict_metadata[key] = metadata.state_dict_metadata[like.fqn]
    write_metadata(checkpoint, metadata)


def test_a_program_that_is_ended_leaves_no_half_of_a_folder(tmp_path: Path) -> None:
    script = """
import os, signal, time
from pathlib import Path
from simreg_megatron import cli
from simreg_megatron.checkpoint.appearing import appearing

def work():
    with appearing(Path("export")) as folder:
        (folder / "model.safetensors").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

cli.app = work
cli.main()
"""
    ended = jobs.run([sys.executable, "-c", script], cwd=tmp_path)
    assert ended.returncode == 128 + signal.SIGTERM and not list(tmp_path.iterdir())


def test_what_a_killed_export_left_goes_and_what_a_running_one_makes_stays(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from pathlib import Path
from simreg_megatron.checkpoint.appearing import appearing

with appearing(Path("export")) as folder:
    (folder / "model.safetensors").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    jobs.run([sys.executable, "-c", script], cwd=tmp_path)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".export.partial-")
    with appearing(tmp_path / "export") as folder:
        assert left.exists(), "one that was made just now may be another's, who does not hold it yet"
        (folder / "config.json").write_text("{}")
    shutil.rmtree(tmp_path / "export")
    os.utime(left, (0, 0))
    with appearing(tmp_path / "export") as folder:
        assert list(tmp_path.iterdir()) == [folder] and folder != left
        with appearing(tmp_path / "export") as other:
            assert sorted(tmp_path.iterdir()) == sorted([folder, other]), "one that is under way is not touched"
            (other / "config.json").write_text("{}")
        (tmp_path / "export/config.json").unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_an_export_is_held_until_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another export that starts while this one goes to disk would take it for one that was killed."""
    own = appearing_module.os.replace
    seen = []

    def replace_late(source: Path, target: Path) -> None:
        os.utime(source, (0, 0))
        with contextlib.suppress(RuntimeError), appearing(tmp_path / "export"):
            seen.append(source.exists())
            raise RuntimeError
        own(source, target)

    monkeypatch.setattr(appearing_module.os, "replace", replace_late)
    with appearing(tmp_path / "export") as folder:
        (folder / "config.json").write_text("{}")
    assert seen == [True] and (tmp_path / "export" / "config.json").read_text() == "{}"


def test_an_export_appears_where_a_link_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export of hours once ended in "Not a directory", and took all with it."""
    (tmp_path / "scratch").mkdir()
    (tmp_path / "model").symlink_to(tmp_path / "scratch")
    with appearing(tmp_path / "model") as partial:
        (partial / "config.json").touch()
    assert (tmp_path / "model").is_symlink() and (tmp_path / "scratch" / "config.json").is_file()
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    with pytest.raises(CheckpointError, match="is a mount point"), appearing(tmp_path / "out"):
        pytest.fail("before anything is made")
