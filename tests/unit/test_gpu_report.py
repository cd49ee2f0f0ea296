# SPDX-License-Identifier: Apache-2.0
"""`make gpu` without a GPU: both calls with `--pretend`, parts that fail, and reports of doctored results."""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import records
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import report, run
from benchmarks.gpu.parts import CALLS, Part, Setting
from benchmarks.gpu.run import NO_TIME, TOO_LONG, Outcome, Runner

# Both calls ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_pretend_goes_all_the_way_on_a_cpu(call: str, tmp_path: Path) -> None:
    pytest.importorskip("megatron.training")
    assert gpu.main(["--pretend", "--output", str(tmp_path), "--calls", call]) == 0
    page = (tmp_path / "report.md").read_text()
    assert report.PRETENDED in page and "## Failed\n\nNothing.\n" in page
    assert f"| torch | {torch.__version__} |" in page and "| transformer-engine | " in page
    if call == "a":
        assert "| `test_mamba::test_mamba_layers` | skip | 0.0 | torch sees no CUDA device |" in page
        assert all(f"\n| {name} | 1 | " in page for name in ("plain", "simreg", "launch", "mixtral", "save"))
        assert "\n| resume | 7 | " in page, "it goes on where save ended"
    else:
        assert "| 2 x 64 x 32, float32 | tiled | " in page and "No table" not in page
        assert "| SimReg, chunks | time on the wall | " in page and "--hidden-size 32" in page
        assert "| a profiled step | plain | with SimReg |" in page and "## steps-350m" in page


# Parts ---------------------------------------------------------------------------------------------------------------


def python(*statements: str) -> tuple[str, ...]:
    """A command that runs these statements; the status is 1 if one raises."""
    return (sys.executable, "-c", "\n".join(statements))


@pytest.fixture
def run_parts(tmp_path: Path) -> Callable[..., dict[str, Outcome]]:
    """run_parts(stage, stage, ..., seconds=450): the outcomes by name; results lie in tmp_path."""

    def run_them(*stages: list[Part], seconds: float = 450.0) -> dict[str, Outcome]:
        found: list[Outcome] = []
        Runner(tmp_path, seconds, {"GIVEN": "yes"}).run(stages, found.append)
        return {one.name: one for one in found}

    return run_them


def test_a_part_that_takes_too_long_leaves_nothing_behind(
    run_parts: Callable[..., dict[str, Outcome]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of torchrun are in sessions of their own: neither a signal nor the death of their parent ends them."""
    number, log = tmp_path / "pid", tmp_path / "long.log"
    start = python(
        "import signal, subprocess", "signal.signal(signal.SIGINT, signal.SIG_DFL)",
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)",
        f"open('{number}', 'w').write(str(child.pid))", "print('begun', flush=True)", "child.wait()",
    )  # fmt: skip
    has_begun = lambda: log.exists() and log.read_text().endswith("\nbegun\n")  # noqa: E731
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: 1e9 if has_begun() else 0.0))
    found = run_parts([Part("long", (start,), 240)], [Part("later", (python("pass"),))])
    assert found["long"].state == TOO_LONG and found["later"] == Outcome("later", NO_TIME)
    child = b""
    with contextlib.suppress(OSError):  # it is gone, or has no parent that waits for it
        child = Path("/proc", number.read_text(), "environ").read_bytes()
    assert not child, "it has its memory"


@pytest.fixture(params=[False, True], ids=["on a GPU", "pretended"])
def parts(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Part]:
    monkeypatch.setattr("benchmarks.gpu.parts.shutil.which", lambda program: f"/usr/bin/{program}")
    text = ("--data", "text/train", "--tokenizer", "text/t.model")
    setting = Setting(tmp_path / "out", tmp_path / "scratch", text, request.param)
    found = [part for call in CALLS for stage in setting.stages(call) for part in stage]
    assert len({part.name for part in found}) == len(found), "each has files of its own"
    return {part.name: part for part in found}


def is_pretended(parts: dict[str, Part]) -> bool:
    return "memcheck-tiled" not in parts


def test_every_command_is_one_that_its_module_takes(parts: dict[str, Part], monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the measurement."""
    taken: list[Path] = []
    monkeypatch.setattr(records, "finish", lambda path, *_, **__: taken.append(path))
    monkeypatch.setattr(records, "read", lambda path: [])
    commands = [command for part in parts.values() for command in part.commands]
    measuring = [command[2:] for command in commands if command[2].startswith("benchmarks.")]
    modules = {"steps", "step_pairs", "gpu.forms", *(() if is_pretended(parts) else ("gpu.tiles",))}
    assert {words[0] for words in measuring} == {f"benchmarks.{name}" for name in modules}
    for module, *words in measuring:
        monkeypatch.setattr(sys, "argv", [module, *words])
        monkeypatch.delitem(sys.modules, module, raising=False)  # runpy warns of a module that is there
        runpy.run_module(module, run_name="__main__")
        assert str(taken[-1]) in words
        assert "--data" in words or module.endswith(("forms", "tiles"))
    assert len(taken) == len(measuring)


# Doctored results ----------------------------------------------------------------------------------------------------
