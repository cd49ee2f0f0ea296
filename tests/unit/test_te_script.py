# SPDX-License-Identifier: Apache-2.0
"""tools/te_on_cpu.sh where something is missing: one sentence with its name, and no failure."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.helpers import jobs

ROOT = Path(__file__).resolve().parents[2]
BASH = shutil.which("bash") or "/bin/bash"
TOOLS = ("bash", "cat", "cp", "cut", "dirname", "mkdir", "rm", "sha256sum", "tr")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A checkout whose .venv answers for a torch of CUDA 13 and whose pip finds nothing."""
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        (tmp_path / "bin" / tool).symlink_to(str(shutil.which(tool)))
    repo = tmp_path / "repo"
    (repo / "tools").mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "te_on_cpu.sh", repo / "tools")
    (repo / ".venv" / "bin").mkdir(parents=True)
    (repo / ".venv" / "simreg-stamp").write_text("recipe\n")
    python(repo, "13.0")
    return repo


def executable(path: Path, body: str) -> None:
    path.write_text(f"#!{BASH}\n{body}\n")
    path.chmod(0o755)


def python(repo: Path, cuda: str) -> None:
    executable(repo / ".venv" / "bin" / "python", f'[ "$1" = -c ] && echo "{cuda}"')


def run(repo: Path, **variables: str) -> tuple[int, str]:
    """The status, and the last sentence."""
    environment = {"PATH": str(repo.parent / "bin"), **variables}
    done = jobs.run([BASH, str(repo / "tools" / "te_on_cpu.sh")], env=environment)
    return done.returncode, done.stderr.strip().splitlines()[-1]


def test_without_a_compiler(repo: Path) -> None:
    assert run(repo) == (
        0,
        "test-te: skipped: there is no g++, which compiles Transformer Engine's bindings to torch",
    )
    assert not (repo / "build").exists()


def test_another_folder_is_named_and_what_is_not_ours_is_left_alone(repo: Path) -> None:
    executable(repo.parent / "bin" / "g++", "exit 1")
    precious = repo.parent / "precious"
    shutil.copytree(repo / ".venv", precious)
    status, said = run(repo, TE_VENV=str(precious))
    assert status == 1 and "will not be overwritten" in said and not (precious / "te-origin").exists()
    for _ in range(2):  # begun, and begun again
        status, said = run(repo, TE_VENV=str(repo.parent / "mine"))
        assert status == 0 and "pip could not install" in said
    assert os.access(repo.parent / "mine" / "bin" / "python", os.X_OK) and not (repo / "build").exists()


def test_without_the_environment_to_start_from(repo: Path) -> None:
    (repo / ".venv" / "simreg-stamp").unlink()
    assert run(repo) == (1, "test-te: there is no .venv to start from: run 'make setup' first.")
