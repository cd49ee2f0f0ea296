# SPDX-License-Identifier: Apache-2.0
"""An objective that a package brings: the file of docs/objectives.md, installed, under the tests of every objective."""

import os
import re
import sys
from pathlib import Path

import pytest

from launch.planned import python_path
from simreg_megatron import objectives
from tests.helpers import jobs
from tests.helpers.pages import ROOT, blocks


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder on the import path as an installer leaves it."""
    folder = tmp_path_factory.mktemp("site")
    found = [block for block in blocks(ROOT / "docs/objectives.md") if "toy" in block.text]
    python, toml = (next(block.text for block in found if block.language == kind) for kind in ("python", "toml"))
    (folder / "toy_objective.py").write_text(python)
    group, line = re.fullmatch(r'\[project\.entry-points\."(.+)"\]\n(.+)', toml.strip()).groups()
    info = folder / "toy_objective-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-objective\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{line.replace(chr(34), '')}\n")
    return folder


def run(folder: Path, *arguments: str) -> str:
    """Run Python in an environment that has the package, and return its output."""
    environment = {**os.environ, "PYTHONPATH": python_path(folder, ROOT)}
    done = jobs.run([sys.executable, *arguments], cwd=ROOT, env=environment, merged=True)
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.megatron
def test_it_passes_what_every_objective_must(package: Path) -> None:
    said = run(package, "-m", "pytest", "-q", "-rs", "tests/objectives/test_every_objective.py", "--objective", "toy")
    assert " passed" in said and "failed" not in said and "skipped" not in said, said
    assert int(re.search(r"(\d+) passed", said).group(1)) >= 12


def test_it_is_in_the_flags_and_in_combinations_and_not_imported_before(package: Path) -> None:
    ask = (
        "import sys; from simreg_megatron import SimRegConfig, cli, objectives\n"
        "assert 'toy' in objectives.names() and 'toy_objective' not in sys.modules\n"
        "both = SimRegConfig(objective='simreg:10,toy:0.1', objective_options='toy.power=3').parts\n"
        "print(both[1].options, both[1].temperature)\n"
        "try: SimRegConfig(objective='toy', lambda_=1, objective_options='force=1')\n"
        "except ValueError as error: print(error)\n"
        "cli.main(['flags'])"
    )
    said = " ".join(run(package, "-c", ask).split())
    assert "{'power': 3.0} 0.1 SimReg objective toy does not support force=1: its options are power" in said
    assert "z-loss, placebo, toy, none" in said
    words = ("--simreg-objective", "toy", "--simreg-lambda", "1", "--dry-run")
    said = run(package, "launch/pretrain_llama.sh", *words)
    assert "--simreg-chunk-size 64" in said and "--simreg-temperature" not in said, "it has its own"


@pytest.mark.slow
@pytest.mark.megatron
def test_it_is_the_same_function_in_every_layout(package: Path) -> None:
    said = run(package, "-m", "tests.megatron.parity", "--objective", "toy")
    assert len(re.findall(r"^.*toy chunk 24.*\bpass\b", said, re.MULTILINE)) >= 7, said


def test_an_entry_point_without_a_record_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    brought = {
        "broken": "no_such_module:X", "other": "os:sep", "named": "toy_named:TOY", "empty": "toy_named:EMPTY",
        "cold": "toy_named:COLD", "idle": "toy_named:IDLE", "deaf": "toy_named:DEAF", "creg": "toy_named:TOY",
    }  # fmt: skip
    for name, value in brought.items():
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{objectives.GROUP}]\n{name} = {value}\n")
    (tmp_path / "toy_named.py").write_text(
        "from simreg_megatron.objectives import Kind, Objective, find\nTOY = find('sce')\n"
        "def terms(*, power): ...\n"
        "EMPTY = Objective(name='empty', kind=Kind.PAIRS, asks='')\n"
        "COLD = Objective(name='cold', kind=Kind.PAIRS, terms=terms, asks='', temperature=0.1)\n"
        "IDLE = Objective(name='idle', kind=Kind.PAIRS, terms=terms, asks='', idle_with={'power': {'root': 2}})\n"
        "DEAF = Objective(name='deaf', kind=Kind.SUMS, terms=terms, asks='', scalars=lambda *_: {'bias': 0.0})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for cached in (objectives.find, objectives.names):
        cached.cache_clear()
    try:
        for name, sentence in (
            ("broken", "comes from no_such_module:X, which cannot be imported: ModuleNotFound"),
            ("other", "which is wrong: it is not an Objective of that name but 'str'"),
            ("named", "which is wrong: it is not an Objective of that name but 'sce'"),
            ("empty", "which is wrong: it has no function that computes its terms"),
            ("cold", "its terms do not take temperature"),
            ("idle", "limits or idle_with name options that it does not have: power, root"),
            ("deaf", "it trains bias, which terms of its kind are not given"),
            ("creg", "creg is brought by creg and simreg-megatron: uninstall one"),
        ):
            with pytest.raises(ValueError, match=sentence):
                objectives.find(name)
    finally:
        monkeypatch.undo()
        for cached in (objectives.find, objectives.names):
            cached.cache_clear()
