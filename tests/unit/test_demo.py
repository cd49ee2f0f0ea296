# SPDX-License-Identifier: Apache-2.0
"""launch/demo.py and launch/side_by_side.py with stand-ins for the training script: seconds instead of minutes."""

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from launch import demo, side_by_side, timing
from launch.demo import Settings
from launch.side_by_side import ArgumentFold, Job, JobFailed, read_iteration, run_side_by_side

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

print("------------------------ arguments ------------------------")
print("  adam_beta1 ...................................... 0.9")
print("-------------------- end of arguments ---------------------")
for step in range(1, options.train_iters + 1):
    taken = 200.0 + 20.0 * bool(options.simreg_lambda) + (500 if step == 1 else 0)
    print(f" [2026-11-20 21:30:15.4] iteration {step:8d}/{options.train_iters:8d} | elapsed time per iteration (ms): "
          f"{taken} | lm loss: 1 |")
    log("lm loss", 5.0, step)
    log("simreg loss", 2.0 - bool(options.simreg_lambda), step)
    log("simreg negative cosine", 0.4, step)
    log("lm loss validation", 4.5 - 0.25 * bool(options.simreg_lambda), step)
writer.close()
"""


def python_job(name, source, folder):
    command = [sys.executable, "-c", textwrap.dedent(source)]
    return Job(name=name, command=command, log=folder / name / "log.txt")


def plain_console():
    return Console(file=io.StringIO(), width=60)  # narrow: lines must not be folded


def test_iterations_are_read_from_megatrons_lines():
    assert read_iteration(ITERATION_LINE) == (40, 400)
    assert read_iteration(SHARED_LINE) == (40, 400)
    for line in ("Overwriting rerun_state_machine.current_iteration from -1 to 0...", "Evaluating iter 1/10", ""):
        assert read_iteration(line) is None


def test_lines_are_labelled_and_kept(tmp_path):
    console = plain_console()
    source = "print('x' * 200); print('[markup] iteration'); import sys; print('warning', file=sys.stderr)"
    jobs = [python_job("cross-entropy", source, tmp_path), python_job("simreg", source, tmp_path)]
    run_side_by_side(jobs, console=console, steps=1)
    shown = console.file.getvalue().splitlines()
    assert "cross-entropy | " + "x" * 200 in shown
    assert "simreg        | [markup] iteration" in shown
    assert "simreg        | warning" in shown
    for job in jobs:
        assert sorted(job.log.read_text().splitlines()) == sorted(["x" * 200, "[markup] iteration", "warning"])


def test_a_failing_job_stops_the_others(tmp_path):
    marker = tmp_path / "finished"
    failing = python_job("simreg", "print('the cause'); raise SystemExit(3)", tmp_path)
    lasting = python_job("cross-entropy", f"import time; time.sleep(30); open({str(marker)!r}, 'w')", tmp_path)
    start = time.monotonic()
    with pytest.raises(JobFailed, match=r"simreg run stopped with exit status 3: its log is .*log\.txt\.$") as caught:
        run_side_by_side([lasting, failing], console=plain_console(), steps=1)
    assert caught.value.tail == ["the cause"]
    assert time.monotonic() - start < 10
    assert not marker.exists()


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
        run_side_by_side([stubborn, failing], console=plain_console(), steps=1)
    with pytest.raises(ProcessLookupError):
        os.kill(int(stubborn.log.read_text()), 0)


def test_progress_is_said_where_there_is_no_terminal(tmp_path, monkeypatch):
    monkeypatch.setattr(side_by_side, "SECONDS_BETWEEN_NOTES", 0.0)
    console = plain_console()
    source = """
        import time
        for step in (10, 20):
            print(f" [2026-11-20 21:30:15.4] iteration {step:8d}/      40 |", flush=True)
            time.sleep(0.1)
    """
    run_side_by_side([python_job("simreg", source, tmp_path)], console=console, steps=40)
    assert "simreg 20 of 40 steps; about 0.0 min left" in console.file.getvalue()


def test_a_terminal_gets_bars_and_the_same_lines(tmp_path):
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    source = f"print({ITERATION_LINE!r})"
    run_side_by_side([python_job("simreg", source, tmp_path)], console=console, steps=400)
    assert "lm loss: 5.479424E+00" in console.file.getvalue()


def test_megatrons_arguments_are_left_to_the_log():
    fold = ArgumentFold()
    lines = [
        "before",
        "------------------------ arguments ------------------------",
        "  adam_beta1 ...................................... 0.9",
        "  adam_beta2 ...................................... 0.95",
        "-------------------- end of arguments ---------------------",
        "after",
    ]
    shown = [out for line in lines for out in fold.pass_on(line)]
    assert shown == ["before", "(Megatron lists 2 arguments here: see the log file)", "after"]


# ---- the demo as a whole -------------------------------------------------------------------------------------------


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """The demo with quick scripts in place of the training and of the probe."""
    script = tmp_path / "training.py"
    script.write_text(FAKE_TRAINING)
    monkeypatch.setattr(demo, "TORCHRUN", (sys.executable,))
    monkeypatch.setattr(demo, "TRAIN_SCRIPT", script)
    monkeypatch.setattr(demo, "_ensure_corpus", lambda: None)

    def probe_job(settings, name):
        np.savez(
            demo.probe_output(settings, name),
            hidden=np.random.default_rng(0).standard_normal((5, 3)),
            tokens=np.array(list("abcde")),
        )
        return python_job(f"{name} probe", "", settings.output)

    monkeypatch.setattr(demo, "probe_job", probe_job)
    return script


def run_demo(*argv):
    console = Console(file=io.StringIO(), width=160, soft_wrap=True)  # as main makes it
    return demo.main(argv, console=console), console.file.getvalue()


def test_the_demo_ends_with_table_sentence_and_figures(stand_ins, tmp_path):
    output = tmp_path / "out"
    status, said = run_demo("--steps", "4", "--output", str(output))
    assert status == 0, said
    difference = next(line for line in said.splitlines() if "difference" in line and "-0.2500" in line)
    assert "+10.0 % (+-0.0)" in difference
    assert "time per step: run 1 of 4, plain" in said and "time per step: run 4 of 4, plain" in said
    assert "without any SimReg flag, 0.200; SimReg 0.220: +10.0 %" in said
    assert max(map(len, said[said.index("After 4 steps") : said.index("simreg ended")].splitlines())) <= 80
    assert "simreg ended 0.250 nats per token better than cross-entropy" in said
    for figure in ("curves.png", "heatmaps.png"):
        assert str(output / figure) in said
        assert (output / figure).stat().st_size > 10_000
    result = json.loads((output / demo.RESULT).read_text())
    assert [run["validation_loss"] for run in result["runs"].values()] == [4.5, 4.25]
    assert result["settings"]["steps"] == 4 and result["versions"]["torch"]
    assert {"base", "other", "percent", "low", "high"} == set(result["seconds_per_step"])
    hidden = np.random.default_rng(0).standard_normal((5, 3))
    units = hidden / np.linalg.norm(hidden, axis=1, keepdims=True)
    mean = ((units @ units.T).sum() - 5) / 20
    assert result["heatmap_mean_cosine"]["simreg"] == pytest.approx(mean)
    assert "adam_beta1" not in said
    assert "adam_beta1" in (output / "simreg" / "log.txt").read_text()


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
    *_, cause, sentence = said.splitlines()
    assert cause == "out of memory"
    assert sentence.startswith("error: The ") and "exit status 7" in sentence and "log.txt" in sentence


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_being_stopped_stops_the_runs_too(tmp_path, sent):
    script = tmp_path / "training.py"
    script.write_text("import os, time; print('PID', os.getpid(), flush=True); time.sleep(60)")
    starter = f"""
        import signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits "ignore"
        from launch import demo
        demo.TORCHRUN, demo.TRAIN_SCRIPT, demo._ensure_corpus = (sys.executable,), {str(script)!r}, lambda: None
        sys.exit(demo.main(["--output", {str(tmp_path / "out")!r}]))
    """
    command = [sys.executable, "-u", "-c", textwrap.dedent(starter)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as process:
        pids = []
        while len(pids) < 2:
            line = process.stdout.readline()
            assert line, "the demo ended before its runs began"
            pids += [int(line.split()[-1])] if "PID" in line else []
        process.send_signal(sent)
        rest, _ = process.communicate(timeout=10)
    assert process.returncode == 130
    assert rest.splitlines()[-1].startswith("Stopped, with all that was running")
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


def test_the_interval_that_holds_the_set_up_is_left_out():
    log = "".join(
        f"[Rank 0] x [2026-11-20 21:30:15.4] iteration {step:8d}/ 30 | consumed samples: 8 | "
        f"elapsed time per iteration (ms): {time} | lm loss: 1 |\n"
        for step, time in ((1, 900.0), (10, 170.0), (20, 80.5), (30, 79.0))
    )
    assert timing.interval_milliseconds(log, 10) == [80.5, 79.0]


@pytest.mark.parametrize(("words", "changed"), [("run 4 of 4", ""), ("run logged no time per step", "elapsed")])
def test_a_short_run_that_says_no_time_is_an_error(stand_ins, tmp_path, words, changed):
    if changed:
        stand_ins.write_text(FAKE_TRAINING.replace("elapsed time per", "time per"))
    status, said = run_demo("--steps", "4", "--output", str(tmp_path / "out"))
    assert words in said and status == bool(changed)


def test_the_probe_reads_the_model_that_its_run_saved(tmp_path):
    settings = Settings(output=tmp_path)
    command = demo.probe_job(settings, demo.SIMREG).command
    assert command[command.index("--load") + 1] == str(tmp_path / "simreg" / "checkpoints")
    assert command[command.index("--probe-output") + 1] == str(demo.probe_output(settings, demo.SIMREG))
    assert command[command.index("--num-layers") + 1] == "4"
