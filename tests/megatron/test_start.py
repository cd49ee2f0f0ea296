# SPDX-License-Identifier: Apache-2.0
"""How a run starts: with the Megatron of the script's folder, and without `make` for the wheel's dataset helpers."""

import os
import subprocess
import sys
from importlib import util
from pathlib import Path
from types import SimpleNamespace

import pytest

from simreg_megatron import __main__ as entry
from simreg_megatron.cpu import installed
from simreg_megatron.plugin.compat import MegatronSeamError
from tests.helpers import jobs
from tests.helpers.quick import quick

COMPILE = """
import torch.distributed as dist
from megatron.training import global_vars, initialize
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
import simreg_megatron
simreg_megatron.install()
global_vars._GLOBAL_ARGS = object()
initialize._compile_dependencies()
print("started")
simreg_megatron.uninstall()
initialize._compile_dependencies()
"""


pytestmark = pytest.mark.megatron
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import os, sys
from megatron.core import __version__
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.training import training
print("\\n", sys.argv[1:], sys.path[0], os.getcwd() in map(os.path.abspath, sys.path))
print(__version__, training.__file__, hasattr(GPTModel._postprocess, "__wrapped__"))
"""


def python(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "SIMREG_CPU": "", "PYTHONPATH": str(ROOT), **env}
    return jobs.run([sys.executable, *words], cwd="/", env=env)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source tree of Megatron 0.19.77 with a training script, while another release is installed."""
    folder = tmp_path_factory.mktemp("Megatron-LM")
    (megatron,) = util.find_spec("megatron").submodule_search_locations
    (folder / "megatron" / "core").mkdir(parents=True)
    (folder / "megatron" / "training").symlink_to(Path(megatron, "training"))
    for path in Path(megatron, "core").iterdir():
        (folder / "megatron" / "core" / path.name).symlink_to(path)
    version = folder / "megatron" / "core" / "package_info.py"
    text = version.read_text().replace("PATCH = ", "PATCH = 77  # ")
    version.unlink()
    version.write_text(text)
    (folder / "pretrain.py").write_text(SCRIPT)
    return folder


@pytest.mark.parametrize("simreg", quick([False, True], bool), ids=["plain", "torchrun"])
def test_the_megatron_next_to_the_script_runs(simreg: bool, tree: Path, tmp_path: Path) -> None:
    (link := tmp_path / "job.py").symlink_to(tree / "pretrain.py")
    start = ("-m", "torch.distributed.run", "--standalone") if simreg else ()
    words = (str(link), "--simreg-cpu=force", "--lr", "1")
    done = python(*start, "-m", "simreg_megatron", *([] if simreg else ["--plain"]), *words)
    assert done.returncode == 0, done.stderr
    assert f"> Megatron 0.19.77 from {tree}\n" in done.stdout
    given, imported = done.stdout.splitlines()[-2:]
    assert imported.split() == ["0.19.77", f"{tree}/megatron/training/training.py", str(simreg)]
    assert given.endswith(f"] {tree} False"), "as for `python SCRIPT`, the working folder is no place of packages"
    assert simreg or ("'--distributed-backend', 'gloo'" in given and "simreg-cpu" not in given)
    assert "'--lr', '1']" in given


def test_another_megatron_that_was_imported_first_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    entry._check_place_of_megatron(str(tmp_path))
    assert "> Megatron " in capsys.readouterr().out
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    with pytest.raises(MegatronSeamError, match=f"from the script's folder {tmp_path}, but the one in .* first"):
        entry._check_place_of_megatron(str(tmp_path))


@pytest.mark.parametrize(
    ("compiled", "makefile", "make", "runs"), [(1, 0, 1, 0), (1, 1, 1, 1), (1, 1, 0, 0), (0, 0, 1, 1), (0, 1, 0, 1)]
)
def test_make_runs_where_it_can_or_must(compiled, makefile, make, runs: int, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / ("Makefile" if makefile else "other")).touch()
    module = SimpleNamespace(origin=str(tmp_path / "helpers_cpp.so")) if compiled else None
    monkeypatch.setattr(util, "find_spec", lambda name: module)
    monkeypatch.setattr(installed.shutil, "which", lambda name: "/usr/bin/make" if make else None)
    calls = []
    installed.without_make(lambda: calls.append("make"))()
    assert calls == ["make"] * runs


@pytest.mark.slow  # quick with a stand-in: above
def test_megatron_compiles_nothing_in_its_wheel() -> None:
    """Run Megatron's own step before the first one on a GPU, without the CPU backend; it fails in plain Megatron."""
    done = python("-c", COMPILE)
    assert "started" in done.stdout.splitlines()
    assert done.returncode == 1 and "no makefile found" in done.stderr
