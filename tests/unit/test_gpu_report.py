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
from benchmarks.gpu.report import Report
from benchmarks.gpu.run import ENDED, FAILED, NO_TIME, TOO_LONG, Outcome, Runner
from launch.launcher import make_parser
from launch.plan import Machine, build_plan
from simreg_megatron.kernels.form import MODULES

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


def test_without_a_gpu_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--output", str(tmp_path / "none")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: torch ") and " sees no GPU: " in said and said.count("\n") == 1
    assert not (tmp_path / "none").exists()


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


def test_where_memory_does_not_suffice_the_next_command_runs(
    run_parts: Callable[..., dict[str, Outcome]], tmp_path: Path
) -> None:
    out = python("raise MemoryError('CUDA out of memory. Tried to allocate 20 GiB')")
    stage = [
        Part("fits", (out, python("print('small')"))), Part("never", (out, out)),
        Part("other", (python("1 / 0"), python("pass"))),
    ]  # fmt: skip
    found = run_parts(stage)
    assert [found[name].state for name in ("fits", "never", "other")] == [ENDED, FAILED, FAILED]
    assert "small" in (tmp_path / "fits.log").read_text()


def test_what_left_no_file_did_not_run(run_parts: Callable[..., dict[str, Outcome]], tmp_path: Path) -> None:
    """Where pytest is missing python ends with the status of pytest where a test fails; an old file does not count."""
    (tmp_path / "tests.xml").write_text("of an earlier call")
    ends, leaves = python("raise SystemExit(1)"), python(f"open('{tmp_path}/two.xml', 'w')", "raise SystemExit(1)")
    found = run_parts([
        Part("tests", (ends,), 100, "tests.xml", (0, 1, 5)), Part("two", (leaves,), 100, "two.xml", (0, 1, 5)),
    ])  # fmt: skip
    assert (found["tests"].state, found["two"].state) == (FAILED, ENDED)


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


def test_all_tests_and_forms_are_among_the_parts(parts: dict[str, Part]) -> None:
    commands = [command for part in parts.values() for command in part.commands]
    files = {word for command in commands for word in command if word.startswith("tests/gpu/")}
    assert files == {f"tests/gpu/{path.name}" for path in (records.ROOT / "tests" / "gpu").glob("test_*.py")}
    assert {f"tests-forms-{impl}" for impl in MODULES} | {"forms-tiled", "forms-reference"} <= parts.keys()
    for name in (name for name in parts if name.startswith("tests-")):
        assert parts[name].leaves == f"{name}.xml" and parts[name].fine == (0, 1, 5)
    if not is_pretended(parts):
        assert {"tiles", "forms-triton", *(f"memcheck-{impl}" for impl in MODULES)} <= parts.keys()
        batches = [command[-1].split()[1] for command in parts["pairs-350m"].commands]
        assert batches == ["16", "8", "4", "2", "1"]


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


@pytest.mark.parametrize("engine", [False, True])
def test_the_launcher_plans_the_trainings(engine: bool, parts: dict[str, Part]) -> None:
    machine = Machine(gpus=1, world_size=1, transformer_engine=engine)
    for name in ("plain", "simreg", "launch", "mixtral", "save", "resume", "350m"):
        (command,) = parts[name].commands
        family = "mixtral" if "mixtral" in command[1] else "llama"
        options, more = make_parser(family).parse_known_args(command[2:])
        made = build_plan(family, options, more, machine, environ={}, stamp="now")
        flags = [word for flag in made.flags for word in flag]
        assert flags[flags.index("--data-cache-path") + 1].endswith("/cache")
        assert ("--simreg-lambda" in flags) == (name != "plain")
        if name == "350m" and not is_pretended(parts):
            assert flags[flags.index("--save") + 1] == "" and flags[flags.index("--hidden-size") + 1] == "1024"
    assert parts["launch"].commands[0][:2] == ("torchrun", "launch/pretrain_llama.sh")


# Doctored results ----------------------------------------------------------------------------------------------------

JUNIT = """<?xml version="1.0" encoding="utf-8"?><testsuites name="pytest tests"><testsuite name="pytest" errors="1"
failures="1" skipped="1" tests="4" time="9"><testcase classname="tests.gpu.test_forms" name="test_good[a|b]" time="1.25"
/><testcase classname="tests.gpu.test_forms" name="test_bad" time="0.5"><failure message="AssertionError: 3e-3 &lt; 3e-4
more">def test_bad():
&gt;       assert 3e-3 &lt; 3e-4
E       AssertionError</failure></testcase><testcase classname="tests.gpu.test_forms" name="test_bad" time="0.1"><error
message="failed on teardown">in the teardown</error></testcase><testcase classname="tests.gpu.test_mamba"
name="test_mamba_layers" time="0.0"><skipped type="pytest.skip" message="could not import 'mamba_ssm'">line 3</skipped>
</testcase><testcase classname="" name="tests.gpu.test_gone" time="0.2"><error message="collection failure">ImportError
</error></testcase></testsuite></testsuites>"""


def page_of(output: Path, *outcomes: Outcome) -> tuple[str, bool]:
    """The report, and whether something failed."""
    page = Report(output, pretend=False)
    for outcome in outcomes:
        page.add(outcome)
    return (output / "report.md").read_text(), page.failed


def test_the_report_of_it(tmp_path: Path) -> None:
    (tmp_path / "tests-forms.xml").write_text(JUNIT)
    (tmp_path / "tests-forms.log").write_text("FAILED tests/gpu/test_forms.py::test_bad - assert 3e-3 < 3e-4\n")
    (tmp_path / "tests-torn.xml").write_text(JUNIT[:400])
    page, failed = page_of(tmp_path, Outcome("tests-forms", ENDED), Outcome("tests-torn", FAILED))
    assert failed and "Tests: 1 pass, 3 fail, 1 skip. 1 of 2 parts ran to their end." in page
    assert "FAILED tests/gpu/test_forms.py::test_bad - assert 3e-3 < 3e-4" in page.partition("## Trainings")[0]
    assert "| `test_forms::test_good[a\\|b]` | pass | 1.2 |" in page
    assert "| `test_forms::test_bad` | fail | 0.5 | AssertionError: 3e-3 < 3e-4 more |" in page
    assert "| `tests.gpu.test_gone` | fail | 0.2 | collection failure |" in page and "tests-torn.xml" in page
    assert page_of(tmp_path, Outcome("tests-forms", ENDED))[1], "a failed test, though its part ran to its end"
    (tmp_path / "tests-forms.xml").write_text("<testsuites><testsuite/></testsuites>")
    page, failed = page_of(tmp_path, Outcome("tests-forms", ENDED))
    assert not failed and "## Failed\n\nNothing.\n" in page
    assert page_of(tmp_path, Outcome("pairs", TOO_LONG))[1] and page_of(tmp_path, Outcome("pairs", NO_TIME))[1]
