# SPDX-License-Identifier: Apache-2.0
"""tools/setup.sh: which Python it takes, of stand-ins that answer its probe, and what it leaves alone."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers import jobs

ROOT = Path(__file__).resolve().parents[2]
BASH = shutil.which("bash") or "/bin/bash"
NEEDED = ("bash", "cat", "dirname", "mkdir", "rm", "sort")  # all that the script itself calls before it installs


@pytest.fixture
def machine(tmp_path):
    """A machine with the script, the few tools that it calls, and no Python at all."""
    (tmp_path / "bin").mkdir()
    for tool in NEEDED:
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    (tmp_path / "repo" / "tools").mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "setup.sh", tmp_path / "repo" / "tools")
    return tmp_path


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{BASH}\n{body}\n")
    path.chmod(0o755)
    return path


def python(path: Path, verdict: str = "fit") -> Path:
    """A stand-in that answers the probe with this verdict and its own path."""
    return script(path, f'[ "$1" = -c ] && echo "{verdict} {path}"')


def run(machine: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(machine / "bin"), "HOME": str(machine / "home"), **variables}
    command = [BASH, str(machine / "repo" / "tools" / "setup.sh"), *arguments]
    return jobs.run(command, env=environment)


def found(machine: Path, **variables: str) -> str:
    done = run(machine, "--find-python", **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def refusal(machine: Path, *arguments: str, **variables: str) -> str:
    done = run(machine, *arguments, **variables)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


def test_3_12_goes_before_3_13_and_both_before_a_plain_python3(machine):
    plain = python(machine / "bin" / "python3")
    assert found(machine) == str(plain)
    later = python(machine / "bin" / "python3.13")
    assert found(machine) == str(later)
    first = python(machine / "bin" / "python3.12")
    assert found(machine) == str(first)


def test_without_a_python_one_sentence_says_what_to_do(machine):
    assert "install one" in refusal(machine, "--find-python")
    python(machine / "bin" / "python3", verdict="old")
    assert "install one" in refusal(machine)
    assert not (machine / "repo" / ".venv").exists()


def test_the_named_one_wins_and_is_refused_when_unfit(machine):
    python(machine / "bin" / "python3.12")
    named = python(machine / "my python" / "python")
    assert found(machine, PYTHON=str(named)) == str(named)
    old = python(machine / "old" / "python", verdict="old")
    assert str(old) in refusal(machine, "--find-python", PYTHON=str(old))
    assert "/no/such" in refusal(machine, "--find-python", PYTHON="/no/such")
