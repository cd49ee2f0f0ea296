# SPDX-License-Identifier: Apache-2.0
"""launch/demo.py and launch/side_by_side.py with stand-ins for the training script: seconds instead of minutes."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from launch import demo, screen, side_by_side, timing
from launch.demo import Settings
from launch.screen import Screen
from launch.side_by_side import (
    Job,
    JobFailed,
    Notes,
    Trainings,
    read_iteration,
    read_validation,
    read_values,
    run_side_by_side,
)
from tests.helpers import jobs

ROOT = Path(__file__).resolve().parents[2]

# As Megatron 0.19 prints them; the second shares its line with another rank's report.
ITERATION_LINE = (
    " [2026-11-20 21:30:15.439939] iteration       40/     400 | consumed samples:          320 | elapsed time per "
    "iteration (ms): 67.3 | learning rate: 2.000000E-03 | global batch size:     8 | simreg loss: 2.313321E+00 | "
    "lm loss: 5.479424E+00 | loss scale: 1.0 | grad norm: 13.785 | number of skipped iterations:   0 |"
)
SHARED_LINE = "[Rank 0] (after 2 iterations) memory (MB) | allocated: 0.00 | max reserved: 0.00" + ITERATION_LINE

# Speaks and logs like a run of the launcher, in no time; `lm loss validation` is lower with SimReg by 0.25.
FAKE_TRAINING = """
import argparse, pathlib
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

parser = argparse.ArgumentParser()
parser.add_argument("--output", type=pathlib.Path)
parser.add_argument("--train-iters", type=int)
parser.add_argument("--simreg-lambda", type=float, default=0)
options, _ = parser.parse_known_args()
writer = EventFileWriter(str(options.output / "tensorboard"))

def log(tag, value, step):
    summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
    writer.add_event(Event(step=step, wall_time=step, summary=summary))

print("  adam_beta1 ...................................... 0.9")
for step in range(1, options.train_iters + 1):
    taken = 200.0 + 20.0 * bool(options.simreg_lambda) + (500 if step == 1 else 0)
    print(f" [2026-11-20 21:30:15.4] iteration {step:8d}/{options.train_iters:8d} | elapsed time per iteration (ms): "
          f"{taken} | simreg loss: 2.5E-01 | lm loss: 1 |")
    log("lm loss", 5.0, step)
    log("simreg loss", 2.0 - bool(options.simreg_lambda), step)
    log("simreg negative cosine", 0.4, step)
    log("lm loss validation", 4.5 - 0.25 * bool(options.simreg_lambda), step)
    print(f" validation loss at iteration {step} | lm loss value: 4.500000E+00 | lm loss PPL: 9.0E+01 | ")
writer.close()
"""


def python_job(name, source, folder):
    command = [sys.executable, "-c", textwrap.dedent(source)]
    return Job(name=name, command=command, log=folder / name / "log.txt")


class Silent:
    """Nobody watches."""

    def __init__(self):
        self.ticks = 0

    def heard(self, job, line):
        pass

    def tick(self):
        self.ticks += 1


def watched(jobs, *, steps=1, terminal=False):
    """What a person sees of these jobs."""
    console = Console(file=io.StringIO(), width=80, force_terminal=terminal)
    with Screen(console, "training", 10.0) as shown:
        run_side_by_side(jobs, Trainings(shown, jobs, steps))
    return without_blanks(console.file.getvalue())


def without_blanks(said):
    """Before rich 15 a display that nobody sees leaves an empty line when it ends."""
    return "".join(line for line in said.splitlines(keepends=True) if line.strip())


def test_iterations_are_read_from_megatrons_lines():
    assert read_iteration(ITERATION_LINE) == (40, 400)
    assert read_iteration(SHARED_LINE) == (40, 400)
    for line in ("Overwriting rerun_state_machine.current_iteration from -1 to 0...", "Evaluating iter 1/10", ""):
        assert read_iteration(line) is None


def test_losses_are_read_from_megatrons_lines():
    assert read_values(ITERATION_LINE, "lm loss", "simreg loss", "loss") == [5.479424, 2.313321, None]
    evaluated = (
        " validation loss at iteration 16 on validation set | lm loss value: 6.799407E+00 | lm loss PPL: 9E+2 | "
    )
    assert read_validation(evaluated) == (16, 6.799407)
    assert read_validation(ITERATION_LINE) is None


def test_a_run_is_a_line_for_each_step_that_it_logs_and_its_log_has_all(tmp_path):
    source = f"""
        import sys
        print({ITERATION_LINE!r})
        print("x" * 200, file=sys.stderr)
        print(" validation loss at iteration 40 | lm loss value: 4.900000E+00 | lm loss PPL: 1.3E+02 | ")
    """
    jobs = [python_job("cross-entropy", source, tmp_path), python_job("simreg", source, tmp_path)]
    said = watched(jobs, steps=400)
    lines = said.splitlines()
    assert sorted(lines) == sorted(
        f"{name:<13}  step  40  {told}"
        for name in ("cross-entropy", "simreg")
        for told in ("lm loss 5.479    simreg loss 2.313", "validation loss 4.9000")
    )
    for job in jobs:
        assert "x" * 200 in job.log.read_text().splitlines() and ITERATION_LINE in job.log.read_text()


def test_a_failing_job_stops_the_others(tmp_path):
    marker = tmp_path / "finished"
    failing = python_job("simreg", "print('the cause'); raise SystemExit(3)", tmp_path)
    lasting = python_job("cross-entropy", f"import time; time.sleep(120); open({str(marker)!r}, 'w')", tmp_path)
    with pytest.raises(JobFailed, match=r"simreg run stopped with exit status 3: its log is .*log\.txt\.$") as caught:
        run_side_by_side([lasting, failing], Silent())
    assert caught.value.tail == ["the cause"]
    assert not marker.exists(), "it was waited for"


def test_a_job_that_ignores_the_polite_request_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(side_by_side, "GRACE_SECONDS", 0.3)
    source = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid()); time.sleep(30)"
    )
    stubborn = python_job("cross-entropy", source, tmp_path)
    failing = python_job("simreg", f"""
        import pathlib, time
        while not (log := pathlib.Path({str(stubborn.log)!r})).exists() or not log.read_text():
            time.sleep(0.01)
        raise SystemExit(1)
    """, tmp_path)  # fmt: skip
    with pytest.raises(JobFailed):
        run_side_by_side([stubborn, failing], Silent())
    with pytest.raises(ProcessLookupError):
        os.kill(int(stubborn.log.read_text()), 0)


def test_a_silent_job_is_watched_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(side_by_side, "TICK_SECONDS", 0.01)
    watch = Silent()
    run_side_by_side([python_job("simreg", "import time; time.sleep(0.2)", tmp_path)], watch)
    assert watch.ticks > 1


class Clock:
    """Seconds as the test wants them."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(screen.time, "monotonic", lambda: self.now)


def test_a_log_is_never_silent_for_long_and_tells_the_time_left(monkeypatch):
    clock = Clock(monkeypatch)
    console = Console(file=io.StringIO(), width=80)
    with Screen(console, "training", 40.0) as shown:
        for clock.now in (101.0, 104.9):
            shown.tick()
        assert console.file.getvalue() == ""
        clock.now = 105.0
        shown.tick()
        assert console.file.getvalue().splitlines() == ["... training: 12%, 35 s left"]  # of the guess
        shown.done(0.25)
        for clock.now in (109.9, 110.0, 112.0):
            shown.tick()
        assert console.file.getvalue().splitlines()[1:] == ["... training: 25%, 30 s left"]  # of its own pace
        shown.line("news")
        clock.now = 116.9
        shown.tick()
        clock.now = 300.0
        shown.tick()
    assert without_blanks(console.file.getvalue()).splitlines()[2:] == ["news", "... training: 25%, 10 min left"]


def test_a_terminal_gets_a_bar_with_the_time_left_above_the_same_lines(tmp_path):
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with Screen(console, "training", 40.0) as shown:
        shown.done(0.5)
        shown.tick()
        shown.line("a line that stays")
        shown._bars.refresh()
    said = console.file.getvalue()
    assert "50%" in said and "left" in said and "a line that stays\n" in said and "... training" not in said


def test_only_marked_lines_of_other_jobs_are_shown(tmp_path):
    console = Console(file=io.StringIO(), width=80)
    source = "print('> corpus: reading ' + 'much ' * 20); print('noise'); print('> corpus: 25 % of the work is done')"
    with Screen(console, "text", 1.0) as shown:
        run_side_by_side([python_job("text", source, tmp_path)], Notes(shown, mark="> corpus: "))
        assert shown._standing(30.0) == (0.25, 90.0)
    lines = [line for line in console.file.getvalue().splitlines() if not line.startswith("...")]
    assert "".join(lines).count("much") == 20 and lines[0].startswith("reading") and "noise" not in "".join(lines)
    assert max(map(len, lines)) <= 80


# ---- the demo as a whole -------------------------------------------------------------------------------------------


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """The demo with quick scripts in place of the training and of the probe."""
    script = tmp_path / "training.py"
    script.write_text(FAKE_TRAINING)
    monkeypatch.setattr(demo, "TORCHRUN", (sys.executable,))
    monkeypatch.setattr(demo, "TRAIN_SCRIPT", script)
    monkeypatch.setattr(demo, "_ensure_corpus", lambda settings, console: None)

    def probe_job(settings, name):
        for step in settings.probed:
            np.savez(
                demo.probe_output(settings, name, step),
                hidden=np.random.default_rng(step).standard_normal((5, 3)),
                tokens=np.array(list("abcde")),
                labels=np.array([1, 2, 1, 3, 4]),
            )
        return python_job(f"{name} probe", "", settings.output)

    monkeypatch.setattr(demo, "probe_job", probe_job)
    return script


def run_demo(*argv):
    console = Console(file=io.StringIO(), width=80, soft_wrap=True)  # as main makes it where there is no terminal
    return demo.main(argv, console=console), console.file.getvalue()


def test_the_demo_ends_with_table_sentence_and_figures(stand_ins, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for step in (1, 4):
        (tmp_path / "out" / "simreg" / "checkpoints" / f"iter_{step:07d}").mkdir(parents=True)
    (tmp_path / "out" / demo.MARK).touch()
    monkeypatch.setattr(demo, "make_room", lambda settings: None)
    status, said = run_demo("--steps", "4", "--output", "out")
    output = tmp_path / "out"
    assert status == 0, said
    difference = next(line for line in said.splitlines() if "difference" in line and "-0.2500" in line)
    assert "+10.0 % (+-0.0)" in difference
    lines = said.rstrip().splitlines()
    assert "run 1 of 4: plain, 200 ms a step" in lines and "run 4 of 4: plain, 200 ms a step" in lines
    whole = " ".join(said.split())
    assert "without any SimReg flag, 0.200; SimReg 0.220: +10.0 %" in whole
    assert max(map(len, lines)) <= 80 and len(lines) < 80, said
    assert sum(line.startswith("simreg  ") and "lm loss 1" in line for line in lines) == 4
    *_, loss, folder, last = re.split(r"(?=simreg ended|In out:|It took)", whole)
    assert loss.startswith("simreg ended 0.250 nats per token better than cross-entropy")
    assert "The baseline was not tuned." in loss
    assert re.search(
        r"- SimReg in chunks ends lower than cross-entropy: held at width 32 \(-0\.351 nats per token, ", loss
    )
    assert loss.count(" at width ") >= 6, "what kept runs decided"
    assert folder.startswith("In out: report.html (all on one page), curves.png, heatmaps.png, result.json")
    assert lines[-1] == "  .venv/bin/simreg-megatron doctor --script pretrain_gpt.py" and last.startswith("It took")
    assert (output / "report.html").read_text().count("<svg") == 2 and (output / "report.md").is_file()
    for figure in ("curves.png", "heatmaps.png"):
        assert (output / figure).stat().st_size > 10_000
    result = json.loads((output / demo.RESULT).read_text())
    assert [run["validation_loss"] for run in result["runs"].values()] == [4.5, 4.25]
    assert result["settings"]["steps"] == 4 and result["versions"]["torch"]
    assert {"base", "other", "percent", "low", "high"} == set(result["seconds_per_step"])
    hidden = np.random.default_rng(4).standard_normal((5, 3))
    units = hidden / np.linalg.norm(hidden, axis=1, keepdims=True)
    mean, same = ((units @ units.T).sum() - 5) / 20, units[0] @ units[2]
    assert result["heatmap_mean_cosine"]["simreg"] == pytest.approx(mean)
    assert list(result["heatmaps"]) == [f"{run}, step {step}" for step in (1, 4) for run in demo.RUNS]
    assert result["heatmaps"]["simreg, step 4"]["same"] == pytest.approx(same)
    assert f"simreg, step 4: mean cosine {same:.3f} of equal next tokens" in whole
    assert "adam_beta1" not in said
    assert "adam_beta1" in (output / "simreg" / "log.txt").read_text()
    assert [path.name for path in (output / "simreg" / "checkpoints").iterdir()] == ["iter_0000004"]


def test_the_command_of_the_text_is_one():
    """The tests above put a stand-in in its place."""
    done = jobs.run([*demo.CORPUS, "--help"])
    assert done.returncode == 0 and "corpus-builtin" in done.stdout and "--out" in done.stdout


def test_a_second_demo_replaces_the_first_only(tmp_path):
    settings = Settings(output=tmp_path / "out")
    demo.make_room(settings)
    old, mine = settings.output / "simreg" / "log.txt", settings.output / "mine.txt"
    old.parent.mkdir()
    old.touch()
    mine.touch()
    demo.make_room(settings)
    assert not old.parent.exists()
    assert mine.exists()


def test_a_folder_of_someone_elses_is_left_alone(stand_ins, tmp_path):
    precious = tmp_path / "out" / "simreg" / "thesis.tex"
    precious.parent.mkdir(parents=True)
    precious.touch()
    status, said = run_demo("--output", str(tmp_path / "out"))
    assert status == 1 and "give another --output" in said
    assert precious.exists()


def test_a_run_that_fails_ends_the_demo_with_its_last_lines_and_log(stand_ins, tmp_path):
    stand_ins.write_text("print('out of memory'); raise SystemExit(7)")
    status, said = run_demo("--output", str(tmp_path / "out"))
    assert status == 1
    lines = said.splitlines()
    sentence = " ".join(lines[lines.index("out of memory") + 1 :])
    assert sentence.startswith("error: The ") and "exit status 7" in sentence and "log.txt" in sentence


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_being_stopped_stops_the_runs_too(tmp_path, sent):
    script = tmp_path / "training.py"
    script.write_text("import os, time; print('PID', os.getpid(), flush=True); time.sleep(60)")
    starter = f"""
        import signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits "ignore"
        from launch import demo
        demo.TORCHRUN, demo.TRAIN_SCRIPT, demo._ensure_corpus = (sys.executable,), {str(script)!r}, lambda *_: None
        sys.exit(demo.main(["--output", {str(tmp_path / "out")!r}]))
    """
    command = [sys.executable, "-u", "-c", textwrap.dedent(starter)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with jobs.started(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as process:
        logs = [tmp_path / "out" / name / "log.txt" for name in demo.RUNS]
        while not all(log.is_file() and log.read_text().endswith("\n") for log in logs):
            assert process.poll() is None, "the demo ended before its runs began"
            time.sleep(0.02)
        pids = [int(log.read_text().split()[-1]) for log in logs]
        process.send_signal(sent)
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Stopped, and so is everything it started" in rest
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("words", [["--steps", "1"], ["--simreg-lambda", "0"], ["--simreg-lambda", "nan"]])
def test_settings_that_show_nothing_are_refused(words, capsys):
    with pytest.raises(SystemExit) as refused:
        demo.read_settings(words)
    assert refused.value.code == 2
    assert words[0] in capsys.readouterr().err.splitlines()[-1]


def test_the_runs_differ_in_simreg_alone():
    settings = Settings(simreg_lambda=2.5)
    plain, simreg = (
        [word.replace(f"/{name}", "/NAME") for word in settings.training_flags(name)]
        for name in (demo.CROSS_ENTROPY, demo.SIMREG)
    )
    assert [pair for pair in zip(plain, simreg, strict=True) if pair[0] != pair[1]] == [
        ("--simreg-objective", "--simreg-lambda"),
        ("none", "2.5"),
    ]


def test_steps_are_timed_against_megatron_without_any_flag_of_the_plugin():
    settings = Settings(simreg_lambda=2.5)
    plain, simreg = (settings.timing_flags(name) for name in (demo.PLAIN, demo.SIMREG))
    assert not any("simreg" in word for word in plain if word.startswith("--"))
    assert simreg[len(plain) :] == ["--simreg-lambda", "2.5", "--simreg-chunk-size", "64"]
    assert "--verbose" in plain, "the logs have all that Megatron says"


def test_the_interval_that_holds_the_set_up_is_left_out():
    log = "".join(
        f"[Rank 0] x [2026-11-20 21:30:15.4] iteration {step:8d}/ 30 | consumed samples: 8 | "
        f"elapsed time per iteration (ms): {time} | lm loss: 1 |\n"
        for step, time in ((1, 900.0), (10, 170.0), (20, 80.5), (30, 79.0))
    )
    assert timing.interval_milliseconds(log, 10) == [80.5, 79.0]


@pytest.mark.parametrize(("words", "changed"), [("run 4 of 4", ""), ("logged no time per step", "elapsed")])
def test_a_short_run_that_says_no_time_is_an_error(stand_ins, tmp_path, words, changed):
    if changed:
        stand_ins.write_text(FAKE_TRAINING.replace("elapsed time per", "time per"))
    status, said = run_demo("--steps", "4", "--output", str(tmp_path / "out"))
    assert words in said and status == bool(changed)


def test_the_probe_reads_the_model_that_its_run_saved(tmp_path, monkeypatch):
    settings = Settings(output=tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/site")
    job = demo.probe_job(settings, demo.SIMREG)
    assert job.environment["PYTHONPATH"] == f"{ROOT}:/site", "packages may be there alone"
    command = job.command
    assert command[command.index("--load") + 1] == str(tmp_path / "simreg" / "checkpoints")
    assert command[command.index("--probe-output") + 1] == str(tmp_path / "simreg" / "hidden.npz")
    assert command[command.index("--probe-steps") + 1] == "50,400"
    assert demo.probe_output(settings, demo.SIMREG, 50) == tmp_path / "simreg" / "hidden-50.npz"
    assert command[command.index("--num-layers") + 1] == "4"
