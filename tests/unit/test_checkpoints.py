# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint a run goes on from, and which may be deleted, in folders as a killed run leaves them."""

from __future__ import annotations

import errno
import io
import json
import os
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

from launch import checkpoints
from launch.checkpoints import TRACKER, is_torn, is_whole, iterations, newest_whole, path_of, prune, repair
from launch.flags import LaunchError


def make(folder: Path, iteration: int, *, index: bytes = b"index", config: str | None = "torch_dist") -> Path:
    """A `torch_dist` checkpoint; without `config` the save was killed before its last file."""
    path = path_of(folder, iteration)
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"tensors")
    if index:
        (path / ".metadata").write_bytes(index)
    if config is not None:
        (path / "metadata.json").write_text(json.dumps({"sharded_backend": config, "sharded_backend_version": 1}))
    return path


def track(folder: Path, text: str) -> None:
    (folder / TRACKER).write_text(text)


@pytest.mark.parametrize(
    ("index", "config", "whole", "torn"),
    [
        pytest.param(b"index", "torch_dist", True, False, id="whole"),
        pytest.param(b"", "torch_dist", False, True, id="no-index"),
        pytest.param(b"index", None, False, False, id="unknown"),  # the tracker decides
        pytest.param(b"", None, False, True, id="killed"),
    ],
)
def test_complete_and_incomplete_checkpoints(
    index: bytes, config: str | None, whole: bool, torn: bool, tmp_path: Path
) -> None:
    path = make(tmp_path, 5, index=index, config=config)
    assert (is_whole(path), is_torn(path)) == (whole, torn)


@pytest.mark.parametrize("text", ['{"sharded_back', "null"])
def test_a_config_that_was_cut_off(text: str, tmp_path: Path) -> None:
    path = make(tmp_path, 5)
    (path / "metadata.json").write_text(text)
    assert not is_whole(path)


def test_the_tracker_decides_in_the_older_format(tmp_path: Path) -> None:
    for iteration in (10, 20):
        (path_of(tmp_path, iteration) / "mp_rank_00").mkdir(parents=True)
    track(tmp_path, "10")
    assert newest_whole(tmp_path) == 10 and repair(tmp_path) == [] == prune(tmp_path, 1)
    assert iterations(tmp_path) == [10, 20]


def test_a_run_goes_on_from_the_newest_whole_one(tmp_path: Path) -> None:
    for iteration in (10, 20):
        make(tmp_path, iteration)
    torn = make(tmp_path, 30, index=b"", config=None)
    track(tmp_path, "20")
    assert newest_whole(tmp_path) == 20
    assert repair(tmp_path) == [f"{torn} was never finished: deleted"]
    assert iterations(tmp_path) == [10, 20] and repair(tmp_path) == []


@pytest.mark.parametrize("text", ["", "3", "1e\x00", "10"])
def test_a_tracker_that_is_behind_or_damaged_is_corrected(text: str, tmp_path: Path) -> None:
    for iteration in (10, 20):
        make(tmp_path, iteration)
    track(tmp_path, text)
    os.utime(tmp_path / TRACKER, (0, 0))  # a save ends with the tracker, and 20 has ended none
    (said,) = repair(tmp_path)
    assert said.endswith("it names 20, the newest complete checkpoint")
    assert (tmp_path / TRACKER).read_text() == "20"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000010", "iter_0000020", TRACKER]


def test_a_branch_that_was_left_stays_left(tmp_path: Path) -> None:
    """Back to 10, by --ckpt-step or by hand: Megatron wrote the tracker after 20 was finished."""
    for iteration in (10, 20):
        os.utime(make(tmp_path, iteration) / "metadata.json", (1, 1))
    track(tmp_path, "10")
    assert newest_whole(tmp_path) == 10 and repair(tmp_path) == [] and iterations(tmp_path) == [10, 20]


def test_nothing_whole_is_a_new_beginning(tmp_path: Path) -> None:
    make(tmp_path, 10, index=b"", config=None)
    track(tmp_path, "10")
    assert len(repair(tmp_path)) == 2
    assert newest_whole(tmp_path) is None and list(tmp_path.iterdir()) == []


def test_a_release_and_what_is_not_known_stay(tmp_path: Path) -> None:
    (tmp_path / "release").mkdir()
    track(tmp_path, "release")
    foreign = make(tmp_path, 10, config=None)
    assert repair(tmp_path) == [] and foreign.is_dir() and (tmp_path / TRACKER).read_text() == "release"


def test_an_unknown_format_is_accepted_if_megatron_names_it(tmp_path: Path) -> None:
    make(tmp_path, 10, config=None)
    make(tmp_path, 20, config=None)
    track(tmp_path, "10")
    assert newest_whole(tmp_path) == 10
    track(tmp_path, "")
    with pytest.raises(LaunchError, match="is damaged: write the number of the newest complete"):
        repair(tmp_path)


@pytest.mark.parametrize(("module", "name"), [(os, "stat"), (os, "listdir"), (io, "open")])
def test_a_disk_that_is_away_is_no_missing_checkpoint(module, name: str, tmp_path: Path, monkeypatch) -> None:
    """A server that answers with an error once must cost neither the checkpoints nor the training before them."""
    for iteration in (10, 20):
        make(tmp_path, iteration)
    track(tmp_path, "20")
    real, asked = getattr(module, name), list[str]()

    def stale(path, *arguments, **named):
        if str(path).startswith(str(tmp_path)):
            asked.append(str(path))
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return real(path, *arguments, **named)

    for look in (newest_whole, repair, lambda folder: prune(folder, 2)):
        monkeypatch.setattr(module, name, stale)
        with suppress(LaunchError, OSError):
            assert look(tmp_path) in (20, [])
        monkeypatch.undo()
        assert iterations(tmp_path) == [10, 20] and newest_whole(tmp_path) == 20
        assert (tmp_path / TRACKER).read_text() == "20"
    assert asked, "else nothing was away"


def test_what_cannot_be_seen_ends_in_a_sentence(tmp_path: Path, monkeypatch) -> None:
    make(tmp_path, 10)
    monkeypatch.setattr(os, "listdir", Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
    with pytest.raises(LaunchError, match=r"cannot be read \(Stale file handle\): see that its disk is there"):
        newest_whole(tmp_path)
    with pytest.raises(LaunchError, match=r"cannot be read \(File name too long\)"):
        checkpoints.is_there(tmp_path / ("long" * 99))


def test_prune_keeps_the_newest_whole_the_tracked_and_the_unfinished(tmp_path: Path) -> None:
    for iteration in (10, 20, 30, 40):
        os.utime(make(tmp_path, iteration) / "metadata.json", (1, 1))
    make(tmp_path, 50, index=b"", config=None)  # under way
    track(tmp_path, "20")
    assert prune(tmp_path, 2) == [], "the run went back from 30 and 40: they are not its newest two"
    track(tmp_path, "40")
    assert prune(tmp_path, 2) == [path_of(tmp_path, 10), path_of(tmp_path, 20)]
    assert iterations(tmp_path) == [30, 40, 50] and prune(tmp_path, 0) == [path_of(tmp_path, 30)]


def test_a_deletion_that_was_killed_is_finished(tmp_path: Path) -> None:
    path = make(tmp_path, 10)
    path.rename(tmp_path / "iter_0000010.deleting")
    make(tmp_path, 20)
    assert prune(tmp_path, 1) == [] and iterations(tmp_path) == [20]
    assert not (tmp_path / "iter_0000010.deleting").exists()
