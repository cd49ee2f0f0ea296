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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # started as a script, this file finds its neighbours and the package like this

from rich.console import Console  # noqa: E402

from launch import lock, record  # noqa: E402
from launch.flags import LaunchError  # noqa: E402
from launch.launcher import build_plan, look_at_machine, make_parser  # noqa: E402
from launch.side_by_side import Job, JobFailed, run_side_by_side  # noqa: E402
from launch.timing import interval_milliseconds  # noqa: E402
from simreg_megatron import report  # noqa: E402
from simreg_megatron.reproduce.stopping import terminated_like_ctrl_c  # noqa: E402

TRAIN_SCRIPT = ROOT / "launch" / "pretrain_llama.sh"
PROBE_SCRIPT = ROOT / "simreg_megatron" / "probe.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
MARK = "demo.json"  # says that a folder is the demo's own and may be replaced
RESULT = "result.json"  # what was printed and drawn, as numbers

CROSS_ENTROPY, SIMREG = "cross-entropy", "simreg"
PLAIN, TIMING = "plain", "timing"  # Megatron without any flag of the plugin; the folder of the short runs
TIMING_TURNS, TIMING_STEPS, TIMING_INTERVAL = 2, 30, 10  # the first interval does not count
SECONDS_PER_STEP = 1.0  # side by side on two cores, evaluation included
SECONDS_AROUND = 150  # building the corpus, starting, measuring steps, probing, drawing


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
            "--eval-interval": max(1, self.steps // 8),
            "--save": folder / "checkpoints",
            "--save-interval": self.steps,
            "--data-cache-path": folder / "cache",  # one each: two runs would write the same index files at once
        }
        return [*_words(flags), *self._objective(name)]

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
        return [*_words(flags), *self._objective(name)]

    def _objective(self, name: str) -> list[str]:
        if name == PLAIN:
            return []
        weight = {CROSS_ENTROPY: {"--simreg-objective": "none"}, SIMREG: {"--simreg-lambda": f"{self.simreg_lambda:g}"}}
        return _words(weight[name] | {"--simreg-chunk-size": self.chunk_size})


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
        parser.error(f"--steps {settings.steps} draws no curve: give at least 2")
    if not (settings.simreg_lambda > 0 and math.isfinite(settings.simreg_lambda)):
        parser.error(f"--simreg-lambda {settings.simreg_lambda} compares nothing: give a positive number")
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
        console.print(f"error: {error}", markup=False, style="bold red")
        return 1
    except (DemoError, LaunchError, report.ReportError) as error:
        console.print(f"error: {error}", markup=False, style="bold red")
        return 1
    except KeyboardInterrupt:
        console.print(f"Stopped, with all that was running; the logs are in {settings.output}.", markup=False)
        return 130
    return 0


def _run_demo(settings: Settings, console: Console) -> None:
    started, commit = time.monotonic(), record.commit()
    console.print(describe(settings), markup=False, highlight=False)
    with lock.held(settings.output):
        _compare(settings, console, commit=commit, started=started)


def _compare(settings: Settings, console: Console, *, commit: str, started: float) -> None:
    make_room(settings)
    _ensure_corpus()
    names = (CROSS_ENTROPY, SIMREG)
    run_side_by_side([training_job(settings, name) for name in names], console=console, steps=settings.steps)
    steps = measured_steps(settings, console)
    summaries = _report_training(settings, names, steps, console)
    states = _report_hidden_states(settings, names, console)
    write_result(settings, summaries, steps, states, commit=commit, seconds=time.monotonic() - started)


def describe(settings: Settings) -> str:
    """What will happen, and how long it takes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    slowdown = 1 if cores >= 2 else 2
    minutes = (SECONDS_PER_STEP * settings.steps * slowdown + SECONDS_AROUND) / 60
    return (
        f"Two tiny LLaMAs are pretrained side by side in Megatron, {settings.steps} steps each, same text, same seed:\n"
        f"  {CROSS_ENTROPY:<13}  the language-model loss alone; SimReg is measured, not trained\n"
        f"  {SIMREG:<13}  the same plus {settings.simreg_lambda:g} * SimReg, chunks of "
        f"{settings.chunk_size or 'whole sequences'}{' tokens' if settings.chunk_size else ''}\n"
        "Then: what a step costs, measured in short runs, one at a time; a table, curves and heat-maps in "
        f"{settings.output}. "
        f"About {math.ceil(minutes)} minutes on {'this one core' if cores < 2 else 'two cores'}; Ctrl-C stops it all.\n"
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
            raise DemoError(f"{output} holds files that are not a demo's: empty it, or give another --output")
        for name in (CROSS_ENTROPY, SIMREG, TIMING):
            shutil.rmtree(output / name, ignore_errors=True)
    output.mkdir(parents=True, exist_ok=True)
    choices = {**vars(settings), "output": str(output)}
    (output / MARK).write_text(json.dumps(choices, indent=2) + "\n", encoding="utf-8")


def _ensure_corpus() -> None:
    """Build the text before the runs start, so that its progress is seen and nobody waits for the other."""
    from simreg_megatron.data import DataError, ensure_builtin_corpus

    try:
        ensure_builtin_corpus(ROOT / "data" / "builtin")
    except DataError as error:
        raise DemoError(str(error)) from None


def training_job(settings: Settings, name: str) -> Job:
    command = [*TORCHRUN, str(TRAIN_SCRIPT), *settings.training_flags(name)]
    return Job(name=name, command=command, log=settings.output / name / "log.txt", environment=ONE_THREAD)


def measured_steps(settings: Settings, console: Console) -> report.Overhead:
    """Seconds per step of plain Megatron and of SimReg, from short runs that take turns, one at a time."""
    turns = [(PLAIN, SIMREG) if turn % 2 == 0 else (SIMREG, PLAIN) for turn in range(TIMING_TURNS)]
    jobs = [timing_job(settings, name, turn) for turn, names in enumerate(turns) for name in names]
    seconds: dict[str, list[list[float]]] = {PLAIN: [], SIMREG: []}
    started = time.monotonic()
    for number, job in enumerate(jobs):
        left = f", {(time.monotonic() - started) / number * (len(jobs) - number):.0f} s left" if number else ""
        console.print(f"time per step: run {number + 1} of {len(jobs)}, {job.name}{left}", highlight=False)
        _run_unseen([job])
        intervals = interval_milliseconds(job.log.read_text(encoding="utf-8", errors="replace"), TIMING_INTERVAL)
        if not intervals:
            raise DemoError(f"The {job.name} run logged no time per step: its log is {job.log}.")
        seconds[job.name].append([time / 1000 for time in intervals])
    return report.overhead(seconds[PLAIN], seconds[SIMREG])


def timing_job(settings: Settings, name: str, turn: int) -> Job:
    command = [*TORCHRUN, str(TRAIN_SCRIPT), *settings.timing_flags(name)]
    log = settings.output / TIMING / f"{name}-{turn + 1}.txt"
    return Job(name=name, command=command, log=log, environment=ONE_THREAD)


def _run_unseen(jobs: Sequence[Job]) -> None:
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        run_side_by_side(jobs, console=Console(file=nowhere), steps=1)


def _report_training(
    settings: Settings, names: Sequence[str], steps: report.Overhead, console: Console
) -> list[report.Summary]:
    runs = [report.read_run(settings.output / name / "tensorboard", name=name) for name in names]
    summaries = [report.summarize(run) for run in runs]
    curves = settings.output / "curves.png"
    report.draw_curves(
        runs, curves, title=f"Tiny LLaMA, SimReg lambda {settings.simreg_lambda:g}, seed {settings.seed}"
    )
    console.print()
    console.print(report.summary_table(*summaries, steps=steps, title=f"After {settings.steps} steps"))
    console.print(report.compare_validation(*summaries), markup=False, highlight=False)
    console.print(report.describe_steps(steps), markup=False, highlight=False)
    console.print(f"Curves:    {curves}", markup=False, highlight=False)
    return summaries


def _report_hidden_states(settings: Settings, names: Sequence[str], console: Console) -> list[report.HiddenStates]:
    _run_unseen([probe_job(settings, name) for name in names])
    states = [report.read_hidden_states(probe_output(settings, name), name=name) for name in names]
    heatmaps = settings.output / "heatmaps.png"
    report.draw_heatmaps(states, heatmaps, title=f"One validation text after {settings.steps} steps")
    console.print(f"Heat-maps: {heatmaps}", markup=False, highlight=False)
    return states


def write_result(
    settings: Settings,
    summaries: Sequence[report.Summary],
    steps: report.Overhead,
    states: Sequence[report.HiddenStates],
    *,
    commit: str,
    seconds: float,
) -> None:
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
        "seconds_per_step": steps._asdict(),
        "runs": {summary.name: asdict(summary) for summary in summaries},
        "heatmap_mean_cosine": {each.name: report.mean_cosine(each) for each in states},
    }
    (settings.output / RESULT).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def probe_output(settings: Settings, name: str) -> Path:
    return settings.output / name / "hidden.npz"


def probe_job(settings: Settings, name: str) -> Job:
    """Read a trained model's hidden states of one validation text: the run's own flags, another script."""
    os.environ.setdefault("WORLD_SIZE", "1")  # what torchrun would tell the launcher
    options, words = make_parser("llama").parse_known_args(settings.training_flags(name))
    plan = build_plan("llama", options, words, look_at_machine(), environ=os.environ)
    own = ["--load", str(settings.output / name / "checkpoints"), "--probe-output", str(probe_output(settings, name))]
    return Job(
        name=f"{name} probe",
        command=[*TORCHRUN, "-m", "simreg_megatron", str(PROBE_SCRIPT), *plan.arguments, *own],
        log=settings.output / name / "probe.txt",
        environment={**plan.environment, **ONE_THREAD, "PYTHONPATH": str(ROOT)},
    )


if __name__ == "__main__":
    sys.exit(main())
