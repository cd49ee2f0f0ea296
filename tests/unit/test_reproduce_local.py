# SPDX-License-Identifier: Apache-2.0
"""The runner with a stand-in for training that takes a moment: nothing twice, nothing lost, whatever is killed."""

import csv
import io
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from launch import launcher
from simreg_megatron.cli import app
from simreg_megatron.reproduce import local, outcome, pace, screen, speed
from simreg_megatron.reproduce.dataset import Dataset
from simreg_megatron.reproduce.errors import ReproduceError
from simreg_megatron.reproduce.heap import KEPT
from simreg_megatron.reproduce.plan_file import plan_of
from simreg_megatron.reproduce.runs import distinct, entries_of
from simreg_megatron.reproduce.store import DIVERGED, DONE, FAILED, Store, read_kept, thinned
from simreg_megatron.reproduce.tuned import tuned_in, untuned
from tests.helpers import jobs

# It writes what Megatron writes, one loss for each learning rate, and counts its starts. Two rates end early, once.
TRAINER = """
import sys, time, pathlib
flags = dict(zip(sys.argv[1::2], sys.argv[2::2])) if len(sys.argv) % 2 else {}
words = sys.argv[1:]
value = lambda name, default="": words[words.index(name) + 1] if name in words else default
folder = pathlib.Path(value("--output"))
with (folder / "starts").open("a") as stream, (folder.parent / "work").open("a") as work:
    stream.write("x")
    work.write("+")
(folder / "environment.json").write_text(__import__("json").dumps(dict(__import__("os").environ)))
print("> Trains on cpu in fp32")
print(" [now] iteration        3/      6 | lm loss: 5.0 |", flush=True)
time.sleep(float(value("--nap", "0")))
if value("--lr") == "0.5":
    print("RuntimeError: found NaN in local forward loss"); sys.exit(1)
if value("--lr") == "0.4":
    print("OSError: disk full"); sys.exit(3)
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
writer = EventFileWriter(str(folder / "tensorboard"))
def log(step, tag, scalar):
    summary = Summary(value=[Summary.Value(tag=tag, simple_value=scalar)])
    writer.add_event(Event(step=step, wall_time=step, summary=summary))
loss = 4 + (float(value("--lr", "0.002")) - 0.004) ** 2 * 1e4 + int(value("--seed")) / 1000
last, first_time = int(value("--train-iters")), (folder / "starts").read_text() == "x"
for step in range(1, min(last, 20) + 1):
    log(step, "iteration-time", 0.1)
for step in (last // 2, last):
    if step == last and value("--lr") == "0.3" and first_time:
        break
    log(step, "lm loss", loss)
    if not (value("--lr") == "0.2" and first_time):
        log(step, "lm loss validation", loss + (last - step))
writer.close()
with (folder.parent / "work").open("a") as work:
    work.write("-")
"""


@pytest.fixture
def dataset(tmp_path) -> Dataset:
    return Dataset(tmp_path, digest="0" * 64, bytes_per_token=4.0, validation_tokens=20_481)


@pytest.fixture(autouse=True)
def trainer(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text(TRAINER)
    monkeypatch.setattr(local, "launcher_of", lambda family: script)
    monkeypatch.setattr(local, "_POLL_SECONDS", 0.02)


def plan(**flags):
    arms = {"plain": {"flags": {"lr": 2e-3, **flags}}, "simreg": {"flags": {"lr": 4e-3, **flags}}}
    content = {"name": "mine", "question": "?", "sizes": ["tiny"], "steps": {"tiny": 6}, "seeds": 2, "arms": arms}
    return plan_of(content, where="mine")


def run_all(entries, store, dataset, jobs=2):
    runs = distinct(entries)
    told = []
    progress = local.Progress(runs, lambda now: told.append(len(now.ended)))
    local.run_here(runs, store, dataset, jobs=jobs, threads=1, progress=progress)
    store.write_tables(plan(), entries)
    return told


def starts(store, run) -> int:
    return len((store.run_folder(run) / "starts").read_text())


def test_all_runs_end_and_the_table_has_one_line_each(tmp_path, dataset):
    store, entries = Store(tmp_path / "out"), entries_of(plan(), dataset, untuned)
    told = run_all(entries, store, dataset)
    assert told[-1] == 4
    with (tmp_path / "out" / "mine.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["arm"], row["seed"], row["status"]) for row in rows] == [
        (entry.arm, str(entry.seed), DONE) for entry in entries
    ]
    assert float(rows[0]["validation_loss"]) == pytest.approx(4.041, abs=1e-6)
    assert float(rows[0]["bits_per_byte"]) == pytest.approx(4.041 / 0.6931472 / 4, rel=1e-5)
    assert rows[0]["tokens"] == str(6 * 8 * 256)
    assert "--lr 0.002" in rows[0]["flags"]
    with (tmp_path / "out" / "mine-curves.csv").open() as stream:
        curve = [row for row in csv.DictReader(stream) if row["tag"] == "validation_loss"]
    assert [row["step"] for row in curve[:2]] == ["3", "6"]


def test_runs_keep_the_memory_of_large_tensors_unless_told_otherwise(tmp_path, dataset, monkeypatch):
    for name in KEPT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(next(iter(KEPT)), "1")
    store, entries = Store(tmp_path / "out"), entries_of(plan(), dataset, untuned)
    run_all(entries, store, dataset)
    for run in distinct(entries):
        environment = json.loads((store.run_folder(run) / "environment.json").read_text())
        assert {name: environment[name] for name in KEPT} == {**KEPT, next(iter(KEPT)): "1"}


def test_a_table_is_not_written_anew_without_runs_that_lie_nowhere_else(tmp_path, dataset):
    """As of a folder that was copied without its runs, continued with fewer seeds."""
    store, entries = Store(tmp_path / "out"), entries_of(plan(), dataset, untuned)
    run_all(entries, store, dataset)
    store.write_tables(plan(), entries[:1])  # the others' folders are there
    store.write_tables(plan(), entries)
    shutil.rmtree(tmp_path / "out" / "runs")
    kept = (tmp_path / "out" / "mine.csv").read_text()
    again = Store(tmp_path / "out")
    again.write_tables(plan(), entries)
    with pytest.raises(ReproduceError, match=r"mine\.csv has 3 runs that this command does not ask for"):
        again.write_tables(plan(), entries[:1])
    (tmp_path / "out" / "mine.plan.json").unlink()
    with pytest.raises(ReproduceError, match=r"mine\.csv has 3 runs|mine\.csv has 4 runs"):
        Store(tmp_path / "out").refuse_to_lose("mine", entries)
    assert (tmp_path / "out" / "mine.csv").read_text() == kept


def test_a_table_that_lost_its_rows_is_named(tmp_path, dataset):
    store, entries = Store(tmp_path / "out"), entries_of(plan(), dataset, untuned)
    run_all(entries, store, dataset)
    table = tmp_path / "out" / "mine.csv"
    table.write_text(table.read_text().partition("\n")[0])
    with pytest.raises(ReproduceError, match="points of curves, and no run that they belong to"):
        Store(tmp_path / "out")


def test_a_file_that_cannot_be_read_is_not_called_damaged(tmp_path):
    (tmp_path / "afile").write_text("")
    with pytest.raises(ReproduceError, match=r"result\.json cannot be read \(Not a directory\): mend that first"):
        read_kept(tmp_path / "afile" / "result.json")


@pytest.mark.parametrize("text", ['{"llama 64, 1 at a time, 1 threads": null}', "{}"])
def test_a_pace_that_is_no_number_is_measured_anew(text, tmp_path, dataset):
    run = distinct(entries_of(plan(), dataset, untuned))[0]
    (tmp_path / "speed.json").write_text(text)
    assert speed.known([run], Store(tmp_path), jobs=1, threads=1) == {}


def test_what_has_ended_is_never_run_again(tmp_path, dataset):
    store, entries = Store(tmp_path / "out"), entries_of(plan(), dataset, untuned)
    run_all(entries, store, dataset)
    run_all(entries, store, dataset)
    assert [starts(store, run) for run in distinct(entries)] == [1, 1, 1, 1]


def test_a_table_that_came_alone_is_enough_to_continue(tmp_path, dataset):
    """As after a clone: the tables are committed, the folders of the runs are not."""
    store, entries = Store(tmp_path / "out"), entries_of(plan(), dataset, untuned)
    run_all(entries[:3], store, dataset)
    (tmp_path / "clone").mkdir()
    for path in (tmp_path / "out").glob("mine*"):
        shutil.copy(path, tmp_path / "clone")
    before = (tmp_path / "clone" / "mine.csv").read_text()
    clone = Store(tmp_path / "clone")
    run_all(entries, clone, dataset)
    assert [run.name for run in distinct(entries) if clone.run_folder(run).exists()] == [entries[3].run.name]
    assert (tmp_path / "clone" / "mine.csv").read_text().startswith(before)
    curves = (tmp_path / "clone" / "mine-curves.csv").read_text()
    assert curves.startswith((tmp_path / "out" / "mine-curves.csv").read_text())


def test_runs_of_another_device_are_not_continued_here(tmp_path, dataset, monkeypatch):
    store, entries = Store(tmp_path / "out"), entries_of(plan(), dataset, untuned)
    run_all(entries[:3], store, dataset)
    assert {store.result(entry.run)["device"] for entry in entries[:3]} == {"cpu"}
    monkeypatch.setattr(local, "_device", lambda: "NVIDIA H100")
    with pytest.raises(ReproduceError, match="were trained on cpu, and the rest would be on NVIDIA H100: they could"):
        run_all(entries, store, dataset)
    assert not store.run_folder(entries[3].run).exists()
    run_all(entries[:3], store, dataset)  # nothing is left to train


def test_what_trained_a_run_is_read_from_its_log(tmp_path, dataset):
    store, entries = Store(tmp_path / "out"), entries_of(plan(lr=0.5), dataset, untuned)
    (tmp_path / "train.py").write_text(TRAINER.replace("on cpu in fp32", "on NVIDIA H100 80GB HBM3 in bf16"))
    run_all(entries[:1], store, dataset)
    with (tmp_path / "out" / "mine.csv").open() as stream:
        (row,) = csv.DictReader(stream)
    assert (row["status"], row["device"], row["number_type"]) == (DIVERGED, "NVIDIA H100 80GB HBM3", "bf16")
    (store.run_folder(entries[0].run) / "log.txt").unlink()
    found = outcome.outcome(store.run_folder(entries[0].run), 1, 6, dataset)
    assert (found["device"], found["number_type"]) == ("unknown", "unknown")


@pytest.mark.parametrize(
    ("machine", "words", "number_type"),
    [(launcher.Machine(), (), "fp32"), (launcher.Machine(), ("--bf16",), "bf16"),
     (launcher.Machine(gpus=1), (), "bf16"), (launcher.Machine(gpus=1), ("--fp16",), "fp16")],
)  # fmt: skip
def test_the_launcher_says_what_trains(machine, words, number_type, tmp_path, dataset, monkeypatch, capsys):
    monkeypatch.setattr("simreg_megatron.__main__.run", lambda *_, **__: None)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setenv("RANK", "0")
    options, rest = launcher.make_parser("llama").parse_known_args([*words, "--output", str(tmp_path)])
    launcher._train(launcher.build_plan("llama", options, rest, machine, environ={}), verbose=True)
    (tmp_path / "log.txt").write_text(capsys.readouterr().out)
    found = outcome.outcome(tmp_path, 1, 6, dataset)
    device = "NVIDIA H100 80GB HBM3" if machine.gpus else "cpu"
    assert (found["device"], found["number_type"]) == (device, number_type)


def test_a_diverged_run_has_ended_and_a_failed_one_is_tried_again(tmp_path, dataset):
    store = Store(tmp_path / "out")
    arms = {"nan": {"flags": {"lr": 0.5}}, "full": {"flags": {"lr": 0.4}}, "good": {"flags": {"lr": 2e-3}}}
    content = {"name": "mine", "question": "?", "sizes": ["tiny"], "steps": {"tiny": 6}, "seeds": 1, "arms": arms}
    entries = entries_of(plan_of(content, where="mine"), dataset, untuned)
    run_all(entries, store, dataset)
    run_all(entries, store, dataset)
    runs = {entry.arm: entry.run for entry in entries}
    assert store.result(runs["nan"])["status"] == DIVERGED
    assert store.failure(runs["full"])["status"] == FAILED
    assert "disk full" in store.failure(runs["full"])["tail"]
    assert {name: starts(store, run) for name, run in runs.items()} == {"nan": 1, "full": 2, "good": 1}
    with (tmp_path / "out" / "mine.csv").open() as stream:
        assert next((row["arm"], row["validation_loss"]) for row in csv.DictReader(stream)) == ("nan", "")


def test_a_run_that_another_program_trains_is_left_to_it(tmp_path, dataset):
    store, entries = Store(tmp_path / "out"), entries_of(plan(), dataset, untuned)
    taken = entries[0].run
    claim = store.claim(taken)
    assert store.claim(taken) is None
    folder = store.run_folder(taken)
    (tmp_path / "result").write_text(WRITTEN)
    end = f"import os, time; time.sleep(1); os.replace({str(tmp_path / 'result')!r}, {str(folder / 'result.json')!r})"
    with jobs.started([sys.executable, "-c", end], pass_fds=(claim.lock,)) as waiter:
        claim.give_back()  # the other program was killed: its training holds the lock on
        assert store.claim(taken) is None
        run_all(entries, store, dataset)
        assert waiter.wait() == 0
    assert not (folder / "starts").exists()
    assert all(starts(store, run) == 1 for run in distinct(entries) if run is not taken)


WRITTEN = json.dumps(
    {"status": DONE, "validation_loss": 4.0, "version": "0", "commit": "c", "curves": {"validation_loss": [[6, 4.0]]}}
)

SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
import test_reproduce_local as t
from simreg_megatron.reproduce import local, stopping
local.launcher_of = lambda family: Path({trainer!r})
folder = Path({folder!r})
dataset = t.Dataset(folder, digest="0" * 64, bytes_per_token=4.0, validation_tokens=20_481)
entries = t.entries_of(t.plan(nap=1), dataset, t.untuned)
with stopping.terminated_like_ctrl_c():
    t.run_all(entries, t.Store(folder / "out"), dataset)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_after_a_kill_the_same_call_continues_and_no_run_is_made_twice(number, tmp_path, dataset):
    text = SCRIPT.format(here=str(Path(__file__).parent), folder=str(tmp_path), trainer=str(tmp_path / "train.py"))
    store, entries = Store(tmp_path / "out"), entries_of(plan(nap=1), dataset, untuned)
    runs = distinct(entries)
    with jobs.started([sys.executable, "-c", text], stderr=subprocess.DEVNULL) as process:
        while not any(store.result(run) for run in runs):  # some have ended, others are at work or wait
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        process.wait(jobs.TIMEOUT)
        ended = [run for run in runs if store.result(run)]
        run_all(entries, store, dataset)
    assert all(store.result(run)["status"] == DONE for run in runs)
    assert all(starts(store, run) == 1 for run in (ended if number == signal.SIGTERM else runs))
    if number == signal.SIGKILL:  # what went on by itself counts as at work, and its results as results
        work = (tmp_path / "out" / "runs" / "work").read_text()
        assert max(work[:end].count("+") - work[:end].count("-") for end in range(len(work))) == 2


# How it stands with the processor, told once its session has the lowest priority, or not within a minute.
LOOK = """
import os, pathlib, sys, time
session = pathlib.Path("/proc/self/autogroup")
standing = lambda: session.read_text().split()[-1] if session.is_file() else "19"
deadline = time.monotonic() + 60
while standing() != "19" and time.monotonic() < deadline:
    time.sleep(0.02)
folder = pathlib.Path(sys.argv[sys.argv.index("--output") + 1])
(folder / "standing").write_text(f"{os.sched_getscheduler(0) == os.SCHED_IDLE} {os.nice(0)} {standing()}")
sys.exit(3)
"""


def test_low_priority_holds_for_the_runs_sessions_too(tmp_path, dataset):
    """Linux shares the processor among sessions first, and each run has one of its own."""
    (tmp_path / "train.py").write_text(LOOK)
    text = SCRIPT.format(here=str(Path(__file__).parent), folder=str(tmp_path), trainer=str(tmp_path / "train.py"))
    text = text.replace("folder =", "local.give_way()\nfolder =", 1)
    jobs.run([sys.executable, "-c", text])  # in a session of its own, so it lowers nothing of the tests'
    runs = distinct(entries_of(plan(nap=1), dataset, untuned))
    told = {(Store(tmp_path / "out").run_folder(run) / "standing").read_text() for run in runs}
    assert told == {"True 19 19"}


def search(**changes):
    arms = {
        "plain": {"flags": {"simreg-objective": "none"}, "trials": {"lr": [2e-3, 4e-3, 0.5]}},
        "simreg": {"trials": {"lr": [4e-3, 8e-3, 1e-2]}},
    }
    content = {"name": "search", "question": "?", "sizes": ["tiny"], "steps": {"tiny": 6}, "seeds": 1, "arms": arms}
    return plan_of({**content, **changes}, where="search")


def test_the_best_trial_is_taken_over(tmp_path, dataset):
    store, entries = Store(tmp_path / "out"), entries_of(search(), dataset, untuned)
    run_all(entries, store, dataset)
    best = tuned_in(search(), entries, store)
    assert best("plain", "tiny") == {"simreg-objective": "none", "lr": "0.004"}
    assert best("simreg", "tiny") == {"lr": "0.004"}
    with pytest.raises(ReproduceError, match="no arm nobody"):
        best("nobody", "tiny")


def test_the_best_trial_is_that_of_the_same_size(tmp_path, dataset):
    own = {"trials": {"lr": [2e-3, 4e-3]}, "trials_at": {96: {"lr": [8e-3, 6e-3, 7e-3]}}}
    sized = search(sizes=[64, 96], arms={"plain": own, "simreg": own})
    store, entries = Store(tmp_path / "out"), entries_of(sized, dataset, untuned, quick=False)
    for entry in entries:
        loss = 4 + abs(float(entry.run.value("lr")) - (4e-3 if entry.size == 64 else 6e-3))
        store.run_folder(entry.run).mkdir(parents=True, exist_ok=True)
        store.keep(entry.run, {"status": DONE, "validation_loss": loss, "version": "0", "commit": "c", "curves": {}})
    best = tuned_in(sized, entries, store)
    assert [best("simreg", size)["lr"] for size in (64, 96, 128)] == ["0.004", "0.006", "0.006"]


def test_a_table_of_an_older_version_has_fewer_columns(tmp_path, dataset):
    store, entries = Store(tmp_path / "out"), entries_of(plan(), dataset, untuned)
    run_all(entries, store, dataset)
    path = tmp_path / "out" / "mine.csv"
    with path.open() as stream:
        rows = [{name: row[name] for name in row if not name.startswith("margin")} for row in csv.DictReader(stream)]
    with path.open("w") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    shutil.rmtree(tmp_path / "out" / "runs")
    assert Store(tmp_path / "out").result(entries[0].run)["status"] == DONE


def test_no_best_among_some_of_the_trials(tmp_path, dataset):
    store, entries = Store(tmp_path / "out"), entries_of(search(), dataset, untuned)
    run_all(entries[:-1], store, dataset)  # one trial of simreg is missing
    best = tuned_in(search(), entries, store)
    for arm in ("plain", "simreg"):  # nor for the arm that is complete: the other would be tuned elsewhere
        with pytest.raises(ReproduceError, match="has not ended: run `simreg-megatron reproduce search`"):
            best(arm, "tiny")


def test_without_the_launch_scripts_it_says_where_they_are(tmp_path, dataset, monkeypatch):
    monkeypatch.undo()
    with pytest.raises(ReproduceError, match="run this from a clone"):
        local.launcher_of("nobodys-family")


@pytest.mark.parametrize(
    ("seconds", "jobs", "end"), [([1] * 9, 2, 5), ([1], 2, 1), ([3, 1, 1, 1], 2, 3), ([1, 1, 1, 3], 2, 4), ([], 2, 0)]
)
def test_rounds_are_whole(seconds, jobs, end):
    assert speed.until_all_end(seconds, jobs) == end


def test_the_time_left_is_that_of_the_rounds_left(tmp_path, dataset):
    store, entries = Store(tmp_path / "out"), entries_of(plan(), dataset, untuned)
    first, second, third, last = distinct(entries)
    console = Console(file=io.StringIO(), width=200)
    costs = speed.costs([second, third, last], dataset, {"tiny": 60.0})
    assert costs[last] == pytest.approx(25 + 60 * (6 + 10 / 3))
    with screen.shown(console, plan(), [first, second, third, last], entries, store, costs, 2) as progress:
        progress.ended, progress.steps, progress.orphans = [first], {second: 3}, 1
        progress.seen(progress)  # half a run beside a whole one, then another one
    said = console.file.getvalue()
    assert "1 of 4 runs, about 15 min left; 1 of a killed program at work" in said


# What the flags of an arm cost, by its kind: only like is timed by like.
@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ("--lr 0.1", ("off",)),
        ("--simreg-lambda 0 --lr 0.1", ("off",)),
        ("--simreg-objective none --simreg-lambda 1", ("off",)),
        ("--adagc --lr 0.1", ("off", "adagc")),
        ("--adagc --simreg-lambda 3", ("simreg", "adagc")),
        ("--simreg-lambda 1 --simreg-chunk-size 0", ("simreg", "--simreg-chunk-size 0")),
        ("--simreg-objective sigreg:1", ("sigreg",)),
        ("--simreg-objective simreg:auto,sigreg:0.05", ("simreg,sigreg",)),
        ("--simreg-objective mic:0.05 --simreg-objective-options mic.prefixes=16/32",
         ("mic", "--simreg-objective-options mic.prefixes=16/32")),
    ],
)  # fmt: skip
def test_what_a_step_costs_by(flags, kind):
    assert pace._kind({"flags": flags}) == kind


def test_long_curves_are_thinned_and_end_where_they_ended():
    points = [(step, float(step)) for step in range(1, 1967)]
    few = thinned(points)
    assert len(few) <= 200 and few[-1] == (1966, sum(range(1957, 1967)) / 10)
    steps = [step for step, _ in few]
    assert steps == sorted(set(steps))
    assert thinned(points[:200]) == points[:200] and thinned([]) == []


def test_a_machine_without_git_has_no_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert outcome.commit.__wrapped__() == ""


def test_an_installed_package_makes_no_corpus_before_it_refuses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(local, "ROOT", tmp_path)
    for words in (["tuning", "--data", "builtin"], ["moe"], ["tuning", "--model", "350m"]):
        done = CliRunner().invoke(app, ["reproduce", *words, "--dry-run"])
        assert done.exit_code == 2 and "run this from a clone" in done.stderr
    assert not (tmp_path / "data").exists()
