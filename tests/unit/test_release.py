# SPDX-License-Identifier: Apache-2.0
"""The release: one version in three places, and a wheel that holds the package and works without the clone."""

import os
import shutil
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from simreg_megatron import __version__
from tests.helpers import jobs

ROOT = Path(__file__).resolve().parents[2]


def test_package_and_citation_have_the_same_version() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheel and sdist of the files that git knows."""
    tree = tmp_path_factory.mktemp("clone") / "tree"
    files = jobs.run(["git", "ls-files", "-z"], cwd=ROOT, check=True).stdout
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tree / "dist")]
    jobs.run(command, cwd=tree, check=True)
    return tree


@pytest.mark.slow
def test_wheel_and_sdist_hold_the_package_and_nothing_else(built: Path) -> None:
    wheel, sdist = next(built.glob("dist/*.whl")), next(built.glob("dist/*.tar.gz"))
    own = {str(path.relative_to(built)) for path in (built / "simreg_megatron").rglob("*") if path.is_file()}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if name.startswith("simreg_megatron/")} == own
    assert {name.split("/")[0] for name in names} == {"simreg_megatron", f"simreg_megatron-{__version__}.dist-info"}
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert own <= packed and {"README.md", "LICENSE", "setup.py"} <= packed


@pytest.mark.slow
def test_the_wheel_works_without_the_clone(built: Path, tmp_path: Path) -> None:
    """In an environment of its own; the packages of others are those that are here, as torch alone is gigabytes."""
    venv.create(tmp_path / "empty", with_pip=True)
    python, command = (tmp_path / "empty/bin" / name for name in ("python", "simreg-megatron"))
    wheel = next(built.glob("dist/*.whl"))
    install = [python, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", wheel]
    jobs.run(install, cwd=tmp_path, check=True)
    environment = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}

    def run(*words: object) -> str:
        done = jobs.run(words, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run(python, "-c", "import simreg_megatron; print(simreg_megatron.__file__)")
    assert where.startswith(str(tmp_path / "empty"))
    assert run(command, "--version") == f"simreg-megatron {__version__}\n"
    assert "SimReg can be installed" in run(command, "doctor")
