# SPDX-License-Identifier: Apache-2.0
"""`make gpu` without a GPU: the whole way with `--pretend`, parts that fail, and reports of doctored results."""

from __future__ import annotations

import contextlib
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from benchmarks import launched, records
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import report, results, run
from benchmarks.gpu.parts import FORMS, MACHINE, Part, all_parts
from benchmarks.gpu.results import FAIL, PASS, SKIP, Case
from benchmarks.gpu.run import ENDED, FAILED, TOO_LONG, Outcome
from benchmarks.train import is_plain
from launch.launcher import make_parser
from launch.plan import Machine, build_plan
from simreg_megatron.kernels.contrast import MODULES


@pytest.fixture
def the_same_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two calls of one test nobody else edits a file."""
    monkeypatch.setattr(gpu, "_code", lambda: "these files")


# The whole way -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("with_pairs", [False, True], ids=["without pairs", "with pairs"])
@pytest.mark.usefixtures("the_same_code")
def test_pretend_goes_all_the_way_on_a_cpu(with_pairs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.training")
    words = ["--pretend", "--output", str(tmp_path), "--only", f"tests-mamba,forms-tiled{',pairs' * with_pairs}"]
    assert gpu.main(words) == 0
    page = (tmp_path / "report.md").read_text()
    assert page.startswith("# no GPU") and report.PRETENDED in page
    assert f"| torch | {torch.__version__}, CUDA" in page and "| Transformer Engine | " in page
    assert "| `test_mamba::test_mamba_layers` | 0.0 | torch sees no CUDA device |" in page
    assert "Tests: 0 passed, 0 failed, 1 skipped. {0} of {0} parts ran to their end.".format(3 + with_pairs) in page
    assert "| tiled | 2 x 64 x 32 | forward+backward | " in page
    assert ("| SimReg, chunks | time on the wall | " in page and "--hidden-size 32" in page) == with_pairs
    (line,) = (line for line in results.lines(tmp_path / "forms-tiled.csv") if line["size"] == "1 x 100 x 48"
               and line["pass"] == "forward+backward")  # fmt: skip
    assert float(line["seconds"]) > 0 < float(line["product_seconds"]) and float(line["gradient_error"]) < 1e-4

    monkeypatch.setattr(run, "_status", lambda command, *_: 0 if "benchmarks.gpu.machine" in command else pytest.fail())
    assert gpu.main(words) == 0, "what ended is kept"
    assert (tmp_path / "report.md").read_text().count("kept from an earlier call") == 2 + with_pairs


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
    """A module that runs these statements once; the status is 1 where one raises."""
    return ("timeit", "-n1", "-r1", "; ".join(statements))


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """called(parts, *words): the status of `make gpu` with these parts alone."""

    def call(parts: Sequence[Part], *words: str) -> int:
        monkeypatch.setattr(gpu, "all_parts", lambda *_, **__: list(parts))
        return gpu.main(["--pretend", "--output", str(tmp_path), *words])

    return call


def test_a_part_that_fails_is_told_and_the_rest_runs(called: Callable[..., int], tmp_path: Path) -> None:
    broken, absent = Part("broken", (python("1 / 0"),), 1), Part("absent", (("no_such_module",),), 1)
    parts = (broken, absent, Part("whole", (python("pass"),), 1))
    assert called(parts) == 1
    page = (tmp_path / "report.md").read_text()
    assert "The part `broken` ended with status 1 after" in page and "ZeroDivisionError: division by zero" in page
    assert "No module named no_such_module" in page
    assert "| broken | failed |" in page and "| whole | ended |" in page
    assert "1 of 3 parts ran to their end" in page


def test_a_part_that_takes_too_long_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of torchrun are in sessions of their own: neither a signal nor the death of their parent ends them."""
    number = tmp_path / "pid"
    start = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "  # in the background it is ignored
        f"import subprocess; child = subprocess.Popen(['sleep', '600'], start_new_session=True); "
        f"open('{number}', 'w').write(str(child.pid)); print('begun', flush=True); child.wait()"
    )
    ended = subprocess.Popen.wait

    def wait(process: subprocess.Popen, timeout: float | None = None) -> int:
        if timeout is None or timeout < 300:
            return ended(process, timeout)
        while not (tmp_path / "long.log").read_text().endswith("begun\n"):
            assert process.poll() is None
            time.sleep(0.01)
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    outcome = run.run(Part("long", (python(start),), 10), tmp_path, "")
    assert outcome.state == TOO_LONG
    assert results.tail(tmp_path / "long.log").split("\n")[1] == "begun"
    child = b""
    with contextlib.suppress(OSError):  # it is gone, or nobody has waited for it
        child = Path("/proc", number.read_text(), "environ").read_bytes()
    assert not child, "it has its memory"
    page = report.text(tmp_path, [outcome])
    assert "The part `long` ran into its time limit after" in page and "begun" in page
    assert report.has_failed(tmp_path, [outcome])


@pytest.mark.usefixtures("the_same_code")
def test_what_ended_is_not_run_again_unless_asked(called: Callable[..., int], tmp_path: Path) -> None:
    def parts(more: str = "pass") -> list[Part]:
        write = f"open('{tmp_path}/%s', 'a').write('x')"
        commands = {"whole": python(write % "whole", more), "broken": python(write % "broken", "1 / 0")}
        return [Part(name, (command,), 1) for name, command in commands.items()]

    def counts() -> list[int]:
        return [len((tmp_path / name).read_text()) for name in ("whole", "broken")]

    assert called(parts()) == called(parts()) == 1
    assert counts() == [1, 2], "what failed is run again"
    called(parts(), "--again")
    assert counts() == [2, 3]
    called(parts("1"))
    assert counts() == [3, 4], "another command is another part"
    called(parts("1"), "--only", "who")
    assert counts() == [3, 4]


def test_results_of_other_code_are_not_kept(
    called: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Part("whole", (python(f"open('{tmp_path}/count', 'a').write('x')"),), 1)
    for code in ("old", "new", "new"):
        monkeypatch.setattr(gpu, "_code", lambda code=code: code)
        called([part])
    assert (tmp_path / "count").read_text() == "xx"


def test_where_memory_does_not_suffice_the_next_command_runs(tmp_path: Path) -> None:
    out = python("raise MemoryError('CUDA out of memory. Tried to allocate 20 GiB')")
    assert run.run(Part("fits", (out, python("print('small')")), 1), tmp_path, "").state == ENDED
    assert "small" in (tmp_path / "fits.log").read_text()
    assert run.run(Part("never", (out, out), 1), tmp_path, "").state == FAILED
    assert run.run(Part("other", (python("1 / 0"), python("pass")), 1), tmp_path, "").state == FAILED


def test_tests_that_left_no_list_did_not_run(tmp_path: Path) -> None:
    """Where pytest is missing python ends with the status of pytest where a test fails."""
    command, leaving = python("raise SystemExit(1)"), python(f"open('{tmp_path}/tests.xml', 'w'); raise SystemExit(1)")
    assert run.run(Part("tests", (command,), 1, (0, 1, 5), leaves="tests.xml"), tmp_path, "").state == FAILED
    assert run.run(Part("tests", (leaving,), 1, (0, 1, 5), leaves="tests.xml"), tmp_path, "").state == ENDED
    parts = all_parts(tmp_path, quick=False, pretend=False)
    assert all((f"--junitxml={tmp_path / part.leaves}" in part.commands[0]) == bool(part.leaves) for part in parts)
    assert sum(bool(part.leaves) for part in parts) > 5


def test_stopped_by_hand_it_reports_what_it_has(
    called: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run", stop)
    assert called([Part("first", (python("pass"),), 1)]) == 130
    assert "0 of 0 parts" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("quick", [False, True])
def test_the_parts_on_a_gpu(quick: bool, tmp_path: Path) -> None:
    parts = all_parts(tmp_path, quick=quick, pretend=False)
    names = [part.name for part in parts]
    assert names[0] == MACHINE and len(set(names)) == len(names)
    assert {f"tests-forms-{impl}" for impl in MODULES} | {f"forms-{impl}" for impl in FORMS} <= set(names)
    files = {word for part in parts for word in part.commands[0] if word.startswith("tests/gpu/")}
    wanted = {f"tests/gpu/{path.name}" for path in (records.ROOT / "tests" / "gpu").glob("test_*.py")}
    assert files == ({"tests/gpu/test_forms.py"} if quick else wanted)
    assert not any("--pretend" in word or word == "cpu" for part in parts for word in part.commands[0])


@pytest.mark.parametrize("pretend", [False, True])
def test_every_command_is_one_that_its_module_takes(
    pretend: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the measurement; and Megatron's flags are a plan of the launcher's for one GPU."""
    taken: list[Path] = []
    monkeypatch.setattr(records, "finish", lambda path, *_, **__: taken.append(path))
    monkeypatch.setattr(records, "write", lambda path, *_: taken.append(path))
    monkeypatch.setattr(records, "read", lambda path: [])
    commands = [command for part in all_parts(tmp_path, quick=False, pretend=pretend) for command in part.commands]
    measuring = [command for command in commands if command[0].startswith("benchmarks.") and MACHINE not in command[0]]
    assert {command[0] for command in measuring} == {
        "benchmarks.steps",
        "benchmarks.step_pairs",
        "benchmarks.gpu.forms",
    }
    for module, *words in measuring:
        monkeypatch.setattr(sys, "argv", [module, *words])
        monkeypatch.delitem(sys.modules, module, raising=False)  # runpy warns of a module that is there
        runpy.run_module(module, run_name="__main__")
        assert str(taken[-1]) in words
    assert len(taken) == len(measuring)


@pytest.mark.parametrize("batch", [8, 4, 2, 1])
def test_the_launcher_plans_the_350m_steps(batch: int) -> None:
    flags = ("--micro-batch-size", str(batch), "--global-batch-size", str(batch), "--simreg-impl", "triton")
    own = ("--data", "text", "--tokenizer", "tok.model")
    words = (
        "--model",
        "350m",
        "--train-iters",
        "221",
        *launched.of_model("350m"),
        *own,
        *flags,
        "--simreg-lambda",
        "1",
    )
    options, more = make_parser("llama").parse_known_args(words)
    made = build_plan("llama", options, more, Machine(gpus=1, world_size=1), environ={}, corpus=None, stamp="now")
    given = [word for flag in made.flags for word in flag]
    for name, value in (("--micro-batch-size", batch), ("--global-batch-size", batch), ("--simreg-impl", "triton")):
        last = len(given) - 1 - given[::-1].index(name)
        assert given[last + 1] == str(value)
    assert given[given.index("--save") + 1] == "" and "local" in given


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


def outcome(name: str, state: str = ENDED) -> Outcome:
    return Outcome(name, state, 0, 12.0, "")


def test_a_junit_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tests-forms.xml"
    path.write_text(JUNIT)
    found = {test.name: test for test in results.tests(path)}
    assert {name: test.result for name, test in found.items()} == {
        "test_forms::test_good[a|b]": PASS, "test_forms::test_bad": FAIL, "test_mamba::test_mamba_layers": SKIP,
        "tests.gpu.test_gone": FAIL,
    }  # fmt: skip
    assert found["test_forms::test_bad"].reason == "AssertionError: 3e-3 < 3e-4 more", "not that of the teardown"
    assert found["test_forms::test_good[a|b]"] == Case("test_forms::test_good[a|b]", PASS, 1.25)
    assert found["test_mamba::test_mamba_layers"].reason == "could not import 'mamba_ssm'"


def test_the_report_of_it(tmp_path: Path) -> None:
    (tmp_path / "tests-forms.xml").write_text(JUNIT)
    (tmp_path / "tests-torn.xml").write_text(JUNIT[:400])
    ends = [outcome("tests-forms"), outcome("tests-torn", FAILED)]
    page = report.text(tmp_path, ends)
    failed, slow, passed, skipped = (
        page.partition(f"## {title}\n")[2].partition("\n## ")[0]
        for title in ("Failed", "Slower than it should be", "Passed", "Skipped")
    )
    assert "Tests: 1 passed, 3 failed, 1 skipped. 1 of 2 parts ran to their end." in page
    assert "`test_forms::test_bad`: AssertionError: 3e-3 < 3e-4" in failed and ">       assert 3e-3 < 3e-4" in failed
    assert "`tests.gpu.test_gone`: collection failure" in failed and "tests-torn.xml" in failed
    assert slow.strip() == "Nothing that was measured."
    assert "| `test_forms::test_good[a\\|b]` | 1.2 |" in passed and "test_bad" not in passed + skipped
    assert "| `test_mamba::test_mamba_layers` | 0.0 | could not import 'mamba_ssm' |" in skipped
    assert report.has_failed(tmp_path, ends[:1]), "a failed test, though its part ran to its end"
    (tmp_path / "tests-forms.xml").write_text("<testsuites><testsuite/></testsuites>")
    assert not report.has_failed(tmp_path, ends[:1])
    assert "## Failed\n\nNothing.\n" in report.text(tmp_path, ends[:1])


def test_a_report_of_nothing_but_failures_fits_an_issue(tmp_path: Path) -> None:
    one = '<testcase classname="tests.gpu.test_forms" name="test_{}"><failure message="no">{}</failure></testcase>'
    cases = "".join(one.format(number, ("long " * 20 + "\n") * 100) for number in range(200))
    (tmp_path / "tests-forms.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    page = report.text(tmp_path, [outcome("tests-forms")])
    assert page.count("`test_forms::test_") == 200 and len(page) < 65536


def line_of(form: str, way: str, seconds: object, product: float = 1e-3, remark: str = "") -> dict[str, object]:
    return {
        "form": form, "size": "4 x 1024 x 4096", "pass": way, "seconds": seconds, "product_seconds": product,
        "extra_bytes": 1 << 20, "loss_error": 1e-6, "gradient_error": "", "remark": remark,
    }  # fmt: skip


def test_forms_slower_than_the_products_of_their_pairs_are_told(tmp_path: Path) -> None:
    records.write(tmp_path / "forms-tiled.csv", [
        line_of("tiled", "forward", 1.1e-3), line_of("tiled", "forward+backward", 2.9e-3),
        line_of("gemm", "forward", 0.9e-3), line_of("gemm", "forward+backward", 3.1e-3),
        line_of("reference", "forward", 9e-3), line_of("triton", "forward", "", remark="failed: OutOfMemoryError"),
    ])  # fmt: skip
    found = list(results.slow_forms(results.lines(tmp_path / "forms-tiled.csv")))
    assert [one.what.split(", ")[::2] for one in found] == [["tiled", "forward"], ["gemm", "forward+backward"]]
    page = report.text(tmp_path, [outcome("forms-tiled")])
    assert "| tiled, 4 x 1024 x 4096, forward | 1.100 ms | 1.000 ms: 1 plain square product of its pairs |" in page
    assert "| gemm | 4 x 1024 x 4096 | forward+backward | 3.100 | 3.10 | 1.0 | 1e-06 |  |  |" in page
    assert "| triton | 4 x 1024 x 4096 | forward |  |  |  |  |  | failed: OutOfMemoryError |" in page


def test_the_end_of_a_log_is_the_ranks_own(tmp_path: Path) -> None:
    log = tmp_path / "steps.log"
    torchruns = "E1122 12:17 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)\n" + "=\n" * 60
    log.write_text(f"round 1\nbar 1%\rbar 99%\nOutOfMemoryError: CUDA out of memory.\n{torchruns}")
    assert results.tail(log) == "round 1\nbar 99%\nOutOfMemoryError: CUDA out of memory."
    log.write_text("line\n" * 99)
    assert results.tail(log) == "\n".join(["line"] * 40)


def test_lines_of_a_part_that_broke_off_are_in_the_report(tmp_path: Path) -> None:
    records.write(tmp_path / "forms-gemm.csv.other", [line_of("gemm", "forward", 0.5e-3)])
    os.replace(tmp_path / "forms-gemm.csv.other", tmp_path / "forms-gemm.csv.part")
    page = report.text(tmp_path, [outcome("forms-gemm", FAILED)])
    assert "| gemm | 4 x 1024 x 4096 | forward | 0.500 |" in page


@pytest.mark.parametrize(("factor", "told"), [(1.009, False), (1.011, True), (0.9, False)])
def test_steps_over_the_aim_are_told(factor: float, told: bool) -> None:
    steps = [
        {"kind": "SimReg, chunks", "step": str(step), "plain": str(int(is_plain(step))),
         "seconds": str(0.1 if is_plain(step) else 0.1 * factor), "processor_seconds": "1"}
        for step in range(20, 100)
    ]  # fmt: skip
    found = list(results.slow_steps("pairs", steps))
    assert [one.what for one in found] == (["pairs: SimReg, chunks, steps without a log line"] if told else [])
    assert list(results.slow_steps("pairs", steps[:19])) == [], "no whole window"
