# SPDX-License-Identifier: Apache-2.0
"""`make demo`: two tiny LLaMAs on the same text from the same seed, one with SimReg, and what SimReg did.

Both runs log SimReg and the geometry of the hidden states; `cross-entropy` only measures them, `simreg` trains on
lambda * SimReg as well. They run side by side, one thread each, in Megatron's own loop. What a step costs is measured
afterwards, in short runs that have the machine to themselves: plain Megatron and SimReg, in turns.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
EVIDENCE = ROOT / "benchmarks" / "results" / "evidence"
sys.path.insert(0, str(ROOT))  # started as a script, this file finds its neighbours and the package like this

from rich.console import Console  # noqa: E402

from launch import lock, record  # noqa: E402
from launch.flags import LaunchError  # noqa: E402
from launch.launcher import build_plan, look_at_machine, make_parser  # noqa: E402
from launch.screen import Screen, duration, say  # noqa: E402
from launch.side_by_side import Job, JobFailed, Notes, Trainings, Turns, run_side_by_side  # noqa: E402
from launch.timing import interval_milliseconds  # noqa: E402
from simreg_megatron import report  # noqa: E402
from simreg_megatron.installed import python_path  # noqa: E402
from simreg_megatron.report import own  # noqa: E402
from simreg_megatron.report.arms import Arm, read_arms  # noqa: E402
from simreg_megatron.report.page import Grid, Section  # noqa: E402
from simreg_megatron.report.page import write as write_page  # noqa: E402
from simreg_megatron.reproduce.check import read_tables  # noqa: E402
from simreg_megatron.reproduce.heap import KEPT  # noqa: E402
from simreg_megatron.reproduce.stopping import terminated_like_ctrl_c  # noqa: E402
from simreg_megatron.reproduce.verdict import Verdict, judge  # noqa: E402

TRAIN_SCRIPT = ROOT / "launch" / "pretrain_llama.sh"
PROBE_SCRIPT = ROOT / "simreg_megatron" / "tools" / "probe.py"
CORPUS = (sys.executable, "-m", "simreg_megatron.cli", "data", "corpus-builtin")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
ONE_CORE = {**KEPT, "OMP_NUM_THREADS": "1"}
MARK = "demo.json"  # says that a folder is the demo's own and may be replaced
RESULT = "result.json"  # what was printed and drawn, as numbers
CURVES, HEATMAPS, PAGE = "curves.png", "heatmaps.png", "report.html"

RUNS = CROSS_ENTROPY, SIMREG = "cross-entropy", "simreg"
PLAIN, TIMING = "plain", "timing"  # Megatron without any flag of the plugin; the folder of the short runs
TIMING_TURNS, TIMING_STEPS, TIMING_INTERVAL = 2, 30, 10  # the first interval does not count
SECONDS_PER_STEP = 1.0  # side by side on two cores, evaluation included
SECONDS_OF_TEXT, SECONDS_OF_TIMING, SECONDS_OF_PROBES = 100, 60, 40  # guesses, for the bars until the pace is known
EVALUATIONS = 8  # on the way; the early heat-maps are of the first one
WEIGHTS_ALONE = ("--no-save-optim", "--no-save-rng")  # nobody goes on from here


class DemoError(RuntimeError):
    """The demo cannot go on; the message is the one sentence the user reads."""


@dataclass(frozen=True)
class Settings:
    """What both runs share, and the weight that only one has."""

    steps: int = 400
    simreg_lambda: float = 1.0
    chunk_size: int = 64
    seed: int = 1234
    output: Path = Path("runs/demo")

    def training_flags(self, name: str) -> list[str]:
        """The launcher's words for the run `name`."""
        folder = self.output / name
        flags = {
            "--model": "tiny",
            "--output": folder,
            "--seed": self.seed,
            "--train-iters": self.steps,
            "--log-interval": max(1, self.steps // 40),
            "--eval-interval": self.early,
            "--save": folder / "checkpoints",
            "--save-interval": self.early,
            "--data-cache-path": folder / "cache",  # one each: two runs would write the same index files at once
        }
        return [*_words(flags), *WEIGHTS_ALONE, "--verbose", *self._objective(name)]

    @property
    def early(self) -> int:
        """The step of the first evaluation."""
        return max(1, self.steps // EVALUATIONS)

    @property
    def probed(self) -> list[int]:
        """The steps whose hidden states are drawn."""
        return sorted({self.early, self.steps})

    def timing_flags(self, name: str) -> list[str]:
        """Likewise for a short run without evaluation and checkpoints."""
        flags = {
            "--model": "tiny",
            "--output": self.output / TIMING / name,
            "--seed": self.seed,
            "--train-iters": TIMING_STEPS,
            "--log-interval": TIMING_INTERVAL,
            "--eval-iters": 0,
        }
        return [*_words(flags), "--verbose", *self._objective(name)]

    def _objective(self, name: str) -> list[str]:
        if name == PLAIN:
            return []
        weight = {CROSS_ENTROPY: {"--simreg-objective": "none"}, SIMREG: {"--simreg-lambda": f"{self.simreg_lambda:g}"}}
        return _words(weight[name] | {"--simreg-chunk-size": self.chunk_size})


class Findings(NamedTuple):
    """What the demo found: each run's numbers, the time of a step, the hidden states in the order of the maps."""

    summaries: Sequence[report.Summary]
    steps: report.Overhead
    states: Sequence[report.HiddenStates]


def _words(flags: dict[str, object]) -> list[str]:
    return [str(word) for pair in flags.items() for word in pair]


def read_settings(argv: Sequence[str]) -> Settings:
    parser = argparse.ArgumentParser(
        prog="make demo", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=Settings.steps, help="training steps of each run")
    parser.add_argument(
        "--simreg-lambda", type=float, default=Settings.simreg_lambda, help="weight of SimReg in its run"
    )
    parser.add_argument(
        "--chunk-size", type=int, default=Settings.chunk_size, help="tokens per SimReg chunk, 0 = whole sequence"
    )
    parser.add_argument("--seed", type=int, default=Settings.seed, help="of both runs")
    parser.add_argument("--output", type=Path, default=Settings.output, help="folder for logs, checkpoints and figures")
    settings = Settings(**vars(parser.parse_args(argv)))
    if settings.steps < 2:
        parser.error(f"--steps {settings.steps} is too few for a curve: give at least 2")
    if not (settings.simreg_lambda > 0 and math.isfinite(settings.simreg_lambda)):
        parser.error(f"--simreg-lambda {settings.simreg_lambda} leaves nothing to compare: give a positive number")
    return settings


def main(argv: Sequence[str] | None = None, *, console: Console | None = None) -> int:
    """Run the demo; the exit status: 0, 1 where something failed, 130 after Ctrl-C."""
    settings = read_settings(sys.argv[1:] if argv is None else argv)
    console = console or Console(soft_wrap=True)
    try:
        with terminated_like_ctrl_c():
            _run_demo(settings, console)
    except JobFailed as error:
        for line in error.tail:
            console.print(line, markup=False, highlight=False)
        say(console, f"error: {error}", style="bold red")
        return 1
    except (DemoError, LaunchError, report.ReportError) as error:
        say(console, f"error: {error}", style="bold red")
        return 1
    except KeyboardInterrupt:
        say(console, f"Stopped, and so is everything it started; the logs are in {settings.output}.")
        return 130
    return 0


def _run_demo(settings: Settings, console: Console) -> None:
    started, commit = time.monotonic(), record.commit()
    console.print(describe(settings), markup=False, highlight=False)
    with lock.held(settings.output):
        _compare(settings, console, commit=commit, started=started)


def _compare(settings: Settings, console: Console, *, commit: str, started: float) -> None:
    make_room(settings)
    _ensure_corpus(settings, console)
    _train(settings, console)
    found = _look_inside(settings, console, measured_steps(settings, console))
    seconds = time.monotonic() - started
    write_result(settings, found, commit=commit, seconds=seconds)
    _tell(settings, found, console, seconds)


def _headline(console: Console, number: int, text: str) -> None:
    console.print()
    say(console, f"[{number}/4] {text}", style="bold")


def describe(settings: Settings) -> str:
    """What will happen, and how long it takes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    slowdown = 1 if cores >= 2 else 2
    around = SECONDS_OF_TEXT + SECONDS_OF_TIMING + SECONDS_OF_PROBES
    minutes = (SECONDS_PER_STEP * settings.steps * slowdown + around) / 60
    chunks = f"chunks of {settings.chunk_size} tokens" if settings.chunk_size else "whole sequences"
    return (
        f"Two tiny LLaMAs are pretrained in Megatron, {settings.steps} steps, same text, same seed:\n"
        f"  {CROSS_ENTROPY:<13}  the language-model loss alone; SimReg is measured only\n"
        f"  {SIMREG:<13}  the same plus {settings.simreg_lambda:g} * SimReg, {chunks}\n"
        f"About {math.ceil(minutes)} minutes on {'this one core' if cores < 2 else 'two cores'}; Ctrl-C stops it all. "
        f"Logs and results:\n  {settings.output}"
    )


def make_room(settings: Settings) -> None:
    """Empty the output folder of an earlier demo; any other folder's content stays.

    Raises:
        DemoError: the folder holds what no demo has written.
    """
    output = settings.output
    if output.exists() and not output.is_dir():
        raise DemoError(f"{output} is a file: give another --output")
    if output.is_dir() and any(path.name != lock.NAME for path in output.iterdir()):
        if not (output / MARK).is_file():
            raise DemoError(f"{output} has files that no demo wrote: empty it, or give another --output")
        for name in (CROSS_ENTROPY, SIMREG, TIMING):
            shutil.rmtree(output / name, ignore_errors=True)
    output.mkdir(parents=True, exist_ok=True)
    choices = {**vars(settings), "output": str(output)}
    (output / MARK).write_text(json.dumps(choices, indent=2) + "\n", encoding="utf-8")


def _ensure_corpus(settings: Settings, console: Console) -> None:
    """Build the text before the runs start, in a process of its own: training a tokenizer lets no bar move."""
    _headline(console, 1, "The text: documentation of the Python libraries on this machine")
    job = Job(
        name="text",
        command=[*CORPUS, "--out", str(ROOT / "data" / "builtin")],
        log=settings.output / "text.txt",
        environment={"PYTHONPATH": python_path(ROOT)},
    )
    with Screen(console, "text", SECONDS_OF_TEXT) as screen:
        run_side_by_side([job], Notes(screen, mark="> corpus: "))


def _train(settings: Settings, console: Console) -> None:
    _headline(console, 2, "Training: both at once, sharing the cores, so their speed means nothing")
    jobs = [training_job(settings, name) for name in RUNS]
    with Screen(console, "training", SECONDS_PER_STEP * settings.steps) as screen:
        run_side_by_side(jobs, Trainings(screen, jobs, settings.steps))


def training_job(settings: Settings, name: str) -> Job:
    command = [*TORCHRUN, str(TRAIN_SCRIPT), *settings.training_flags(name)]
    return Job(name=name, command=command, log=settings.output / name / "log.txt", environment=ONE_CORE)


def measured_steps(settings: Settings, console: Console) -> report.Overhead:
    """Seconds per step of plain Megatron and of SimReg, from short runs that take turns, one at a time."""
    _headline(console, 3, "What a step costs: short runs of plain Megatron and SimReg, one at a time")
    turns = [(PLAIN, SIMREG) if turn % 2 == 0 else (SIMREG, PLAIN) for turn in range(TIMING_TURNS)]
    jobs = [timing_job(settings, name, turn) for turn, names in enumerate(turns) for name in names]
    seconds: dict[str, list[list[float]]] = {PLAIN: [], SIMREG: []}
    with Screen(console, "time of a step", SECONDS_OF_TIMING) as screen:
        for number, job in enumerate(jobs):
            run_side_by_side([job], Turns(screen, number, len(jobs)))
            intervals = interval_milliseconds(job.log.read_text(encoding="utf-8", errors="replace"), TIMING_INTERVAL)
            if not intervals:
                raise DemoError(f"The {job.name} run logged no time per step: its log is {job.log}.")
            seconds[job.name].append([time / 1000 for time in intervals])
            screen.line(f"run {number + 1} of {len(jobs)}: {job.name}, {median(intervals):.0f} ms a step")
    return report.overhead(seconds[PLAIN], seconds[SIMREG])


def timing_job(settings: Settings, name: str, turn: int) -> Job:
    command = [*TORCHRUN, str(TRAIN_SCRIPT), *settings.timing_flags(name)]
    log = settings.output / TIMING / f"{name}-{turn + 1}.txt"
    return Job(name=name, command=command, log=log, environment=ONE_CORE)


def _look_inside(settings: Settings, console: Console, steps: report.Overhead) -> Findings:
    """Hidden states of one validation text under both models, early and at the end; then all figures and the page."""
    _headline(console, 4, f"Hidden states of one text at step {' and '.join(map(str, settings.probed))}, and figures")
    with Screen(console, "hidden states and figures", SECONDS_OF_PROBES) as screen:
        run_side_by_side([probe_job(settings, name) for name in RUNS], Notes(screen))
        for name in RUNS:
            _leave_last_checkpoint(settings.output / name / "checkpoints")
        arms = read_arms([str(settings.output / name) for name in RUNS])
        states = [
            report.read_hidden_states(probe_output(settings, name, step), name=f"{name}, step {step}")
            for step in settings.probed
            for name in RUNS
        ]
        _draw(settings, arms, states, steps)
    return Findings([report.summarize(run) for arm in arms for run in arm.runs], steps, states)


def _leave_last_checkpoint(folder: Path) -> None:
    for old in sorted(folder.glob("iter_*"))[:-1]:
        shutil.rmtree(old)


def _draw(
    settings: Settings, arms: Sequence[Arm], states: Sequence[report.HiddenStates], steps: report.Overhead
) -> None:
    title = f"Tiny LLaMA, SimReg lambda {settings.simreg_lambda:g}, seed {settings.seed}"
    report.draw_curves([run for arm in arms for run in arm.runs], settings.output / CURVES, title=title)
    report.draw_heatmaps(states, settings.output / HEATMAPS, columns=len(RUNS), title="Hidden states of one text")
    cost = Section(
        "cost",
        "How much longer does a step take with SimReg?",
        verdicts=[report.describe_steps(steps)],
        grids=[Grid(("run", "seconds per step"), [(PLAIN, f"{steps.base:.3f}"), (SIMREG, f"{steps.other:.3f}")])],
    )
    write_page(own.page_of(arms, title=title, further=[cost]), settings.output / PAGE)


def _tell(settings: Settings, found: Findings, console: Console, seconds: float) -> None:
    """The end: table, sentences, folder, next command."""
    console.print()
    table = report.summary_table(*found.summaries, steps=found.steps, title=f"After {settings.steps} steps")
    console.print(table, soft_wrap=False)
    say(console, report.describe_steps(found.steps))
    for each in found.states:
        means = report.mean_cosines(report.excerpt(each))
        say(console, f"{each.name}: mean cosine {means.same:.3f} of equal next tokens, {means.other:.3f} of others.")
    console.print()
    say(console, report.compare_validation(*found.summaries), style="bold")
    say(console, "The baseline was not tuned. Tuned ones, with more seeds (docs/evidence.md):")
    for claim, verdicts in groupby(headlines(EVIDENCE), key=lambda verdict: verdict.claim.says):
        say(console, f"- {claim}: {'; '.join(map(_of_one_size, verdicts))}.")
    console.print()
    say(console, f"In {settings.output}: {PAGE} (all on one page), {CURVES}, {HEATMAPS}, {RESULT}, each run's log.")
    say(console, f"It took {duration(seconds)}. To see what SimReg would wrap in your own training:")
    console.print("  .venv/bin/simreg-megatron doctor --script pretrain_gpt.py", markup=False, highlight=False)


def _of_one_size(verdict: Verdict) -> str:
    low, high = verdict.interval
    seeds = f"{verdict.numbers[0]} and {verdict.numbers[1]} seeds"
    return (
        f"{verdict.word[0].lower()}{verdict.word[1:]} at width {verdict.place.size} "
        f"({verdict.difference:+.3f} {verdict.unit}, {low:+.3f} to {high:+.3f}, {seeds})"
    )


def headlines(folder: Path) -> Iterator[Verdict]:
    """What kept runs say of the claims that are told first."""
    for table in read_tables(folder).values():
        yield from (verdict for verdict in judge(table.plan, table.rows) if verdict.is_headline)


def write_result(settings: Settings, found: Findings, *, commit: str, seconds: float) -> None:
    """The numbers of the table and the heat-maps, and what made them: benchmarks/results/demo.json is such a file."""
    packages = record.packages()
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: packages.get(name) for name in ("torch", "megatron-core")},
        "settings": {name: value for name, value in vars(settings).items() if name != "output"},
        "seconds": seconds,
        "seconds_per_step": found.steps._asdict(),
        "runs": {summary.name: asdict(summary) for summary in found.summaries},
        "heatmap_mean_cosine": {
            name: report.mean_cosines(report.excerpt(each)).both
            for name, each in zip(RUNS, found.states[-2:], strict=True)
        },
        "heatmaps": {each.name: report.mean_cosines(report.excerpt(each))._asdict() for each in found.states},
    }
    (settings.output / RESULT).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def probe_output(settings: Settings, name: str, step: int) -> Path:
    return settings.output / name / f"hidden-{step}.npz"


def probe_job(settings: Settings, name: str) -> Job:
    """Read a trained model's hidden states of one validation text: the run's own flags, another script."""
    os.environ.setdefault("WORLD_SIZE", "1")  # what torchrun would tell the launcher
    options, words = make_parser("llama").parse_known_args(settings.training_flags(name))
    plan = build_plan("llama", options, words, look_at_machine(), environ=os.environ)
    folder = settings.output / name
    own = ["--load", str(folder / "checkpoints"), "--finetune", "--no-load-optim", "--no-load-rng"]
    own += ["--probe-output", str(folder / "hidden.npz"), "--probe-steps", ",".join(map(str, settings.probed))]
    return Job(
        name=f"{name} probe",
        command=[*TORCHRUN, "-m", "simreg_megatron", str(PROBE_SCRIPT), *plan.arguments, *own],
        log=settings.output / name / "probe.txt",
        environment={**plan.environment, **ONE_CORE, "PYTHONPATH": python_path(ROOT)},
    )


if __name__ == "__main__":
    sys.exit(main())
