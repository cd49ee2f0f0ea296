# SPDX-License-Identifier: Apache-2.0
"""launch/demo.py and launch/jobs.py."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from launch import demo
from launch.jobs import Job, JobFailed, run_jobs
from tests.helpers import jobs as jobs_of_tests

ROOT = Path(__file__).resolve().parents[2]


def python_job(name: str, source: str, folder: Path) -> Job:
    return Job(name, [sys.executable, "-c", textwrap.dedent(source)], folder / name / "log.txt")


def test_every_line_is_printed_and_kept(tmp_path: Path) -> None:
    heard = []
    source = "import os; print('one'); print(os.environ['WORD'], flush=True); print('three', end='')"
    job = python_job("a", source, tmp_path)
    run_jobs([Job(job.name, job.command, job.log, {"WORD": "two"})], lambda job, line: heard.append((job.name, line)))
    assert heard == [("a", "one"), ("a", "two"), ("a", "three")] and job.log.read_text() == "one\ntwo\nthree"


def test_a_failure_stops_the_others_and_shows_its_end(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    source = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    lasting = python_job("lasting", source, tmp_path)
    failing = python_job("failing", "import time; time.sleep(1); print('the reason'); raise SystemExit(3)", tmp_path)
    with pytest.raises(JobFailed, match=r"the reason\n(.|\n)*failing run ended with exit status 3: its log is"):
        run_jobs([lasting, failing])
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


# The demo -------------------------------------------------------------------------------------------------------------


def test_simreg_flags_are_passed_on() -> None:
    settings = demo.read_settings(["--steps", "80", "--simreg-temperature", "0.1", "--simreg-lambda=3"])
    assert settings.simreg == ["--simreg-chunk-size", "64", "--simreg-temperature", "0.1", "--simreg-lambda=3"]
    simreg, measured = settings.training_flags("simreg"), settings.training_flags("cross-entropy")
    assert simreg[-5:] == settings.simreg and "--train-iters 80" in " ".join(simreg)
    assert measured[-4:] == ["--simreg-objective", "none", "--simreg-lambda", "0"] and "0.1" in measured


WRONG_WORDS = [
    ("--tau 1", "--tau is no flag of the demo: did you mean --simreg-temperature?"),
    ("--steps 1", "--steps 1 is too few"),
    ("--simreg-tau 1", "there is no flag --simreg-tau: did you mean --simreg-temperature?"),
]


@pytest.mark.parametrize(("words", "sentence"), WRONG_WORDS)
def test_wrong_words_are_refused(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        demo.read_settings(words.split())
    said = capsys.readouterr().err
    assert end.value.code == 2 and "make demo: error:" in said and sentence in said


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    assert demo.main(["--output", str(tmp_path)]) == 1
    assert "has files that no demo wrote" in capsys.readouterr().err and (tmp_path / "thesis.tex").read_text() == "x"


@pytest.mark.slow
@pytest.mark.megatron
def test_the_real_demo(tmp_path: Path) -> None:
    words = ["--steps", "8", "--output", str(tmp_path / "demo"), "--simreg-lambda", "2"]
    done = jobs_of_tests.run([sys.executable, "launch/demo.py", *words], cwd=ROOT, timeout=3000)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "demo" / "result.json").read_text())
    assert result["runs"]["simreg"]["validation_loss"] > 0
    assert result["settings"]["simreg"] == ["--simreg-chunk-size", "64", "--simreg-lambda", "2"]
    assert set(result["heatmaps"]) == {f"{name}, step {step}" for name in demo.RUNS for step in (1, 8)}
    for name in (demo.CURVES, demo.HEATMAPS):
        assert (tmp_path / "demo" / name).stat().st_size > 20_000
    assert "difference" in done.stdout and len(list((tmp_path / "demo" / "simreg" / "checkpoints").glob("iter_*"))) == 1


@pytest.mark.slow
@pytest.mark.megatron
def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "launch/demo.py", "--steps", "400", "--output", str(tmp_path / "demo")]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with jobs_of_tests.started(command, cwd=ROOT, **piped) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if "step" in line and "lm loss" in line)
        process.send_signal(signal.SIGINT)
        said = process.stdout.read()
        assert process.wait(60) == 130 and "Stopped" in said
        assert process.left() == []
