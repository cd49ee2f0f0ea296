# SPDX-License-Identifier: Apache-2.0
"""The Dockerfile and launch/simreg.def: what they copy is there and enough, and what they install is setup.py's."""

from __future__ import annotations

import re
import runpy
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.helpers import jobs
from tools.extra import requirements

ROOT = Path(__file__).resolve().parents[2]
DOCKER = (ROOT / "Dockerfile").read_text(encoding="utf-8")
APPTAINER = (ROOT / "launch" / "simreg.def").read_text(encoding="utf-8")
RECIPES = {"Dockerfile": DOCKER, "simreg.def": APPTAINER}
PLACE = "/opt/simreg-megatron"


def copies(recipe: str) -> dict[str, str]:
    """What is copied, and where to, relative to the folder of the project in the image."""
    if recipe == "Dockerfile":
        lines = [line.split() for line in re.findall(r"^COPY (.*)$", DOCKER, flags=re.MULTILINE)]
        return {source: source if target == "./" else target for *sources, target in lines for source in sources}
    lines = APPTAINER.partition("%files\n")[2].partition("\n\n")[0].splitlines()
    return {source: target.removeprefix(f"{PLACE}/") for source, target in map(str.split, lines)}


def commands(recipe: str) -> list[str]:
    """The shell's commands, in their order."""
    lines = re.findall(r"^(?:RUN|   ) (.*(?:pip|python) .*)$", RECIPES[recipe], flags=re.MULTILINE)
    return [command.strip() for line in lines if "#" not in line for command in line.split("&&")]


def test_both_begin_with_one_image_and_install_the_same() -> None:
    images = [re.findall(r"BASE=(\S+)", text) for text in RECIPES.values()]
    assert images[0] == images[1] and len(images[0]) == 1
    assert commands("Dockerfile") == commands("simreg.def") and copies("Dockerfile") == copies("simreg.def")


@pytest.mark.parametrize("recipe", RECIPES)
def test_they_install_the_demo_extra_and_never_torch(recipe: str) -> None:
    with mock.patch("setuptools.setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    wanted = setup.call_args.kwargs["extras_require"]["demo"]
    names = [name for command in commands(recipe) for name in re.findall(r"[A-Z]{2,}", command.partition(">")[0])]
    assert sorted(line for name in names for line in requirements(name)) == sorted(wanted)
    for command in commands(recipe):
        if command.startswith("pip"):
            assert re.search(r" (?:-r \S+|\.)$", command), "a list of its own"
            assert "--no-deps" in command or command.endswith("/requirements.txt"), "torch would be installed again"


def test_what_is_copied_is_enough_to_build_and_to_launch(tmp_path: Path) -> None:
    """Of the Dockerfile: the other one copies and runs the same."""
    for source, target in copies("Dockerfile").items():
        (shutil.copytree if (ROOT / source).is_dir() else shutil.copy)(ROOT / source, tmp_path / target)
    for command in commands("Dockerfile"):
        if command.startswith("python"):
            words = command.partition(" >")[0].split()
            assert jobs.run([sys.executable, *words[1:]], cwd=tmp_path, check=True).stdout
    wheel = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", "wheel", "."]
    jobs.run(wheel, cwd=tmp_path, check=True)
    assert len(list((tmp_path / "wheel").glob("simreg_megatron-*.whl"))) == 1
    done = jobs.run(["bash", "launch/pretrain_llama.sh", "--dry-run"], cwd=tmp_path, merged=True, check=True)
    assert f"script    {tmp_path}/simreg_megatron/pretrain.py" in done.stdout
