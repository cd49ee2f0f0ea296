# SPDX-License-Identifier: Apache-2.0
"""tools/setup.sh: which Python it takes, and what it leaves alone. Nothing is installed here.

The interpreters are stand-ins: shell scripts that answer the probe as a Python of that kind would, so that a
test can set up machines that have none, too old a one, or a shim that leads nowhere.
"""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import jobs

ROOT = Path(__file__).resolve().parents[2]
BASH = shutil.which("bash") or "/bin/bash"
NEEDED = (
    "bash",
    "cat",
    "dirname",
    "mkdir",
    "rm",
    "sort",
)  # all that the script itself calls before it installs


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
    """The one sentence that a refused set-up ends with."""
    done = run(machine, *arguments, **variables)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


def test_a_fit_one_is_taken(machine):
    fit = python(machine / "bin" / "python3.12")
    assert found(machine) == str(fit)


def test_3_12_goes_before_3_13_and_both_before_a_plain_python3(machine):
    plain = python(machine / "bin" / "python3")
    assert found(machine) == str(plain)
    later = python(machine / "bin" / "python3.13")
    assert found(machine) == str(later)
    first = python(machine / "bin" / "python3.12")
    assert found(machine) == str(first)


def test_uv_is_asked_last_and_may_bring_one(machine):
    brought = machine / "uv" / "python3.12"
    script(
        machine / "bin" / "uv",
        f'case "$1 $2" in\n'
        f'  "python find") [ -e "{brought}" ] && echo "{brought}" ;;\n'
        f'  "python install") cp "{machine / "kept"}" "{brought}" ;;\n'
        f"esac",
    )
    (machine / "bin" / "cp").symlink_to(shutil.which("cp"))
    brought.parent.mkdir()
    python(brought).rename(machine / "kept")
    assert found(machine) == str(brought)
    on_path = python(machine / "bin" / "python3")
    assert found(machine) == str(on_path)


def test_one_without_a_ready_wheel_only_where_nothing_else_is_and_never_silently(machine):
    newer = python(machine / "bin" / "python3", verdict="no-wheel")
    done = run(machine, "--find-python")
    assert done.stdout.strip() == str(newer)
    assert "pip will try to compile" in done.stderr
    fit = python(machine / "home" / ".pyenv" / "versions" / "3.13.0" / "bin" / "python3")
    assert found(machine) == str(fit)


def test_none_at_all_is_one_sentence_with_the_mend(machine):
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


@pytest.mark.skipif(sys.version_info < (3, 12), reason="needs a Python that the script takes")
def test_a_real_interpreter_passes_the_real_probe_and_a_venv_leads_to_its_base(machine):
    chosen = found(machine, PYTHON=sys.executable)
    version = "import sys; print(sys.version_info[:2] >= (3, 12), sys.prefix == sys.base_prefix)"
    assert jobs.run([chosen, "-c", version], check=True).stdout.split() == ["True", "True"]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="needs a Python that the script takes")
class TestInstall:
    """The steps after the search, with a real interpreter whose pip is told to look in an empty folder."""

    @pytest.fixture
    def repo(self, machine):
        (machine / "repo" / "setup.py").write_text("from setuptools import setup\nsetup(name='x')\n")
        (machine / "repo" / "constraints.txt").touch()
        return machine / "repo"

    def offline(self, machine: Path) -> subprocess.CompletedProcess[str]:
        empty = machine / "empty"
        empty.mkdir(exist_ok=True)
        return run(
            machine,
            PYTHON=sys.executable,
            PIP_NO_INDEX="1",
            PIP_FIND_LINKS=str(empty),
            PIP_CONFIG_FILE=os.devnull,
        )

    def test_a_venv_of_someone_else_is_not_touched(self, machine, repo):
        (repo / ".venv").mkdir()
        (repo / ".venv" / "precious").write_text("kept")
        assert "will not be overwritten" in refusal(machine, PYTHON=sys.executable)
        assert (repo / ".venv" / "precious").read_text() == "kept"

    @pytest.mark.slow
    def test_a_failed_installation_says_so_and_leaves_no_stamp(self, machine, repo):
        done = self.offline(machine)
        assert done.returncode == 1
        assert "pip could not install the packages" in done.stderr.splitlines()[-1]
        assert (repo / ".venv" / "simreg-origin").exists()
        assert not (repo / ".venv" / "simreg-stamp").exists()

    @pytest.mark.slow
    def test_nothing_is_done_when_nothing_changed_and_again_when_the_recipe_did(self, machine, repo):
        self.offline(machine)
        digest = (
            "import hashlib, sys; "
            "print(hashlib.sha256(b''.join(open(p, 'rb').read() for p in sys.argv[1:])).hexdigest())"
        )
        files = [str(repo / name) for name in ("setup.py", "constraints.txt", "tools/setup.sh")]
        stamp = jobs.run([sys.executable, "-c", digest, *files], check=True).stdout
        (repo / ".venv" / "simreg-stamp").write_text(stamp)
        quiet = self.offline(machine)
        assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
        with (repo / "setup.py").open("a") as file:
            file.write("# another recipe\n")
        assert self.offline(machine).returncode == 1

    def test_two_at_once_take_turns(self, machine, repo):
        (repo / ".venv").mkdir()  # not ours: the script ends right after the lock, without installing
        with (repo / ".venv.lock").open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            command = [BASH, str(repo / "tools" / "setup.sh")]
            environment = {"PATH": str(machine / "bin"), "PYTHON": sys.executable}
            with jobs.started(command, env=environment, stderr=subprocess.PIPE, text=True) as second:
                assert "another set-up is at work" in second.stderr.readline()
                assert second.poll() is None
                fcntl.flock(held, fcntl.LOCK_UN)
                rest = second.communicate(timeout=jobs.TIMEOUT)[1]
        assert "will not be overwritten" in rest
