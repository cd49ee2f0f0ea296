# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that an earlier version of the plugin saved (tests/fixtures) go on today, with all of their state."""

import hashlib
import json
import os
import runpy
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import make, snapshot
from tests.fixtures.runs import KEPT, SAVED_AT, STEPS, write_text
from tests.helpers.quick import quick
from tests.megatron import forks, runs

SAVED = sorted(make.HERE.glob("saved-*"))
CASES = {  # the kept checkpoint, and how many data-parallel ranks go on from it
    "one": ("one", 1),
    "one to dp2": ("one", 2),
    "dp2, distributed": ("dp2", 2),
    "dp2, distributed, to one": ("dp2", 1),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    assert not runs.forked(write_text, folder / "text", folder=folder).status
    return folder / "text"


def values_of(name: str) -> dict[str, Any]:
    return json.loads((SAVED[0] / f"{name}.json").read_text())


def unpacked(name: str, folder: Path) -> Path:
    """Megatron unpickles what it loads: so the bytes are those that were saved."""
    archive = SAVED[0] / f"{name}{make.ENDING}"
    assert hashlib.sha256(archive.read_bytes()).hexdigest() == values_of(name)["sha256"]
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize("case", quick(CASES, lambda case: case in ("one", "dp2, distributed, to one")))
def test_all_state_is_carried_over(case: str, text: Path, tmp_path: Path) -> None:
    name, processes = CASES[case]
    expected, saved = values_of(name), unpacked(name, tmp_path / "saved")
    flags = (*KEPT[name].all_flags(text, tmp_path / "index"), "--load", str(saved))
    done = runs.forked(_train, tmp_path / "out", flags, folder=tmp_path, processes=processes)
    assert done.status == 0, done.output[-3000:]
    started = make.summary(snapshot.read(tmp_path / "out", "start"))
    assert started["scheduler"] == expected["state"]["scheduler"], "AdaGC's averages among it"
    assert started["tensors"] == expected["state"]["tensors"], "trained scalars and Adam's averages among it"
    assert "when the checkpoint was written" not in done.output and "the checkpoint has no state" not in done.output

    losses = snapshot.losses(tmp_path / "out")
    assert losses == pytest.approx(expected["losses"][SAVED_AT:], rel=1e-5) and len(losses) == STEPS - SAVED_AT
    line, awaited = make.logged(done.output)[0], expected["logged"][SAVED_AT]
    # Three objectives and the output layer add to a gradient in bfloat16, in another order than when it was saved.
    rel = 1e-3 if "--bf16" in flags else 1e-4
    assert {name: line[name] for name in awaited} == pytest.approx(awaited, rel=rel, abs=1e-6), "lambda among it"
    factors = [each["simreg lambda"] for each in expected["logged"]]
    assert len(set(factors)) == STEPS, "lambda changes in every step"


@pytest.mark.slow
def test_what_is_not_loaded_is_missed(text: Path, tmp_path: Path) -> None:
    expected, saved = values_of("one")["state"], unpacked("one", tmp_path / "saved")
    flags = (*KEPT["one"].all_flags(text, tmp_path / "index"), "--load", str(saved), "--no-load-optim")
    assert runs.forked(_train, tmp_path / "out", flags, folder=tmp_path).status == 0
    started = make.summary(snapshot.read(tmp_path / "out", "start"))
    assert started["scheduler"]["simreg_adagc"]["steps"] == 0 < expected["scheduler"]["simreg_adagc"]["steps"]
    weights = {name for name in expected["tensors"] if name.startswith("weight ")}
    same = {name for name, value in started["tensors"].items() if value == expected["tensors"][name]}
    assert same == weights


def _train(out: Path, flags: tuple[str, ...]) -> None:
    from simreg_megatron import install
    from simreg_megatron.cpu.backend import MEGATRON_FLAGS, connections

    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = connections(flags)
    forks.quick_save()
    install()
    snapshot.watch(out)
    sys.argv = [str(runs.PRETRAIN), *MEGATRON_FLAGS, *flags]
    runpy.run_path(str(runs.PRETRAIN), run_name="__main__")
