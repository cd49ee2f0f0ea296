# SPDX-License-Identifier: Apache-2.0
"""The Dockerfile and launch/simreg.def: what they copy is there and enough, and what they install is setup.py's."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.helpers import jobs

ROOT = Path(__file__).resolve().parents[2]
DOCKER = (ROOT / "Dockerfile").read_text(encoding="utf-8")
APPTAINER = (ROOT / "launch" / "simreg.def").read_text(encoding="utf-8")


def copies(recipe: str) -> dict[str, str]:
    """Return what is copied, and where to in the project's folder of the image."""
    if recipe is DOCKER:
        lines = [line.split() for line in re.findall(r"^COPY (.*)$", DOCKER, flags=re.MULTILINE)]
        return {source: source if target == "./" else target for *sources, target in lines for source in sources}
    lines = APPTAINER.partition("%files\n")[2].partition("\n\n")[0].splitlines()
    return {source: target.removeprefix("/opt/simreg-megatron/") for source, target in map(str.split, lines)}


def commands(recipe: str) -> list[str]:
    lines = re.findall(r"^(?:RUN|   ) ((?:pip|python) .*)$", recipe, flags=re.MULTILINE)
    return [command.strip() for line in lines for command in line.split("&&")]


def test_both_recipes_are_the_same() -> None:
    assert re.findall(r"BASE=(\S+)", DOCKER) == re.findall(r"BASE=(\S+)", APPTAINER) != []
    assert commands(DOCKER) == commands(APPTAINER) and copies(DOCKER) == copies(APPTAINER)


@pytest.mark.slow
def test_what_is_copied_is_enough_to_build_and_to_launch(tmp_path: Path) -> None:
    """Test the Dockerfile: the other recipe copies and runs the same."""
    for source, target in copies(DOCKER).items():
        (shutil.copytree if (ROOT / source).is_dir() else shutil.copy)(ROOT / source, tmp_path / target)
    for command in commands(DOCKER):
        if command.startswith("python"):
            words = command.partition(" >")[0].split()
            assert jobs.run([sys.executable, *words[1:]], cwd=tmp_path, check=True).stdout
    wheel = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", "wheel", "."]
    jobs.run(wheel, cwd=tmp_path, check=True)
    assert len(list((tmp_path / "wheel").glob("simreg_megatron-*.whl"))) == 1
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}  # as in a container
    done = jobs.run(["bash", "launch/pretrain_llama.sh", "--dry-run"], cwd=tmp_path, env=env, merged=True, check=True)
    assert f"script    {tmp_path}/simreg_megatron/pretrain.py" in done.stdout
