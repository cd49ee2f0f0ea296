# SPDX-License-Identifier: Apache-2.0
"""Compare two tiny LLaMAs on the same text from the same seed, one with SimReg: `make demo`.

`cross-entropy` only measures SimReg and the geometry of the hidden states, `simreg` trains on it as well. They run side
by side, one thread each.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # started as a script, this file finds its neighbours and the package like this

from examples.heatmap import draw_heatmaps, excerpt, mean_cosines, read_hidden_states  # noqa: E402
from launch import lock  # noqa: E402
from launch.flags import LaunchError, group_flags  # noqa: E402
from launch.jobs import KEEP_HEAP, Job, JobFailed, run_jobs  # noqa: E402
from launch.options import make_parser  # noqa: E402
from launch.plan import build_plan  # noqa: E402
from launch.planned import look_at_machine, python_path  # noqa: E402
from launch.preflight import check_own_flags, suggestion  # noqa: E402
from simreg_megatron.tools import curves  # noqa: E402

TRAIN_SCRIPT = ROOT / "launch" / "pretrain_llama.sh"
PROBE_SCRIPT = ROOT / "examples" / "probe.py"
TORCHRUN = (sys.executable, str(ROOT / "launch" / "agent.py"), "--standalone", "--nproc-per-node", "1")
ONE_CORE = {**KEEP_HEAP, "OMP_NUM_THREADS": "1"}
MARK = "demo.json"  # says that a folder is the demo's own and may be replaced
RESULT = "result.json"
CURVES, HEATMAPS = "curves.png", "heatmaps.png"
RUNS = CROSS_ENTROPY, SIMREG = "cross-entropy", "simreg"
EVALUATIONS = 8  # on the way; the early heat-maps are of the first one
_ITERATION = re.compile(r"\] iteration +(\d+)/ *\d+ \|")
_VALIDATION = re.compile(r"^ validation loss at iteration (\d+) on validation set \|.*? lm loss value: (\S+)")


@dataclass(frozen=True)
class Settings:
    """The settings that both runs share, and the --simreg-* flags of one of them."""

    steps: int
    seed: int
    output: Path
    simreg: Sequence[str]

    @property
    def early(self) -> int:
        """Return the step of the first evaluation."""
        return max(1, self.steps // EVALUATIONS)

    def training_flags(self, name: str) -> list[str]:
        """Return the launcher's arguments for a run."""
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
        words = [str(word) for pair in flags.items() for word in pair]
        return [*words, "--no-save-optim", "--no-save-rng", *self.objective(name)]

    def objective(self, name: str) -> list[str]:
        """Return the plugin's flags: cross-entropy measures what SimReg trains on, with the same settings."""
        measured = ["--simreg-objective", "none", "--simreg-lambda", "0"]
        return list(self.simreg) if name == SIMREG else [*self.simreg, *measured]


def read_settings(argv: Sequence[str]) -> Settings:
    """Read the command line; what it does not know is passed on to the run with SimReg."""
    parser = argparse.ArgumentParser(
        prog="make demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Any --simreg-* flag (docs/flags.md) sets the run with SimReg; by default lambda 1 and chunks of 64.",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=400, help="training steps of each run (default: 400)")
    parser.add_argument("--seed", type=int, default=1234, help="of both runs (default: 1234)")
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="(default: runs/demo)")
    options, flags = parser.parse_known_args(argv)
    if options.steps < 2:
        parser.error(f"--steps {options.steps} is too few for a curve: give at least 2")
    if unknown := [flag for flag in flags if flag.startswith("--") and not flag.startswith("--simreg-")]:
        parser.error(f"{unknown[0]} is no flag of the demo: {suggestion(unknown[0], ())} (--simreg-*: docs/flags.md)")
    given = {flag.partition("=")[0] for flag in flags}
    defaults = {"--simreg-lambda": "1", "--simreg-chunk-size": "64"}
    words = [word for name, value in defaults.items() if name not in given for word in (name, value)] + flags
    try:
        check_own_flags(group_flags(words))
    except LaunchError as error:
        parser.error(str(error))
    return Settings(options.steps, options.seed, options.output, words)


def main(argv: Sequence[str] | None = None) -> int:
    settings = read_settings(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run_demo(settings)
    except (JobFailed, LaunchError, curves.ReportError) as error:
        print("" if isinstance(error, JobFailed) else "error: ", error, sep="", file=sys.stderr)  # a log has its own
        return 1
    except KeyboardInterrupt:
        print(f"Stopped, and everything that was started; the logs are in {settings.output}.", file=sys.stderr)
        return 130
    return 0


def run_demo(settings: Settings) -> None:
    """Train both models, draw what they learned, and print the comparison."""
    started = time.monotonic()
    print(
        f"Two tiny LLaMAs are pretrained in Megatron, {settings.steps} steps, same text, same seed:\n"
        f"  {CROSS_ENTROPY:<13}  the language-model loss alone; SimReg is measured only\n"
        f"  {SIMREG:<13}  {' '.join(settings.simreg)}\n"
        f"With 400 steps this takes 4 to 12 minutes on two cores. Ctrl-C stops it. Results: {settings.output}"
    )
    with lock.held(settings.output):
        make_room(settings)
        print("\n[1/3] The text: documentation of the Python libraries on this machine", flush=True)
        words = ["data", "corpus-builtin", "--out", str(ROOT / "data" / "builtin")]
        corpus = [sys.executable, "-m", "simreg_megatron.cli", *words]
        run_jobs([Job("text", corpus, settings.output / "text.txt", {"PYTHONPATH": python_path(ROOT)})])
        print("\n[2/3] Training: both at once, sharing the cores", flush=True)
        commands = {name: [*TORCHRUN, str(TRAIN_SCRIPT), *settings.training_flags(name)] for name in RUNS}
        logs = {name: settings.output / name / "log.txt" for name in RUNS}
        run_jobs([Job(name, commands[name], logs[name], ONE_CORE) for name in RUNS], print_progress)
        print("\n[3/3] Hidden states of one text, and figures", flush=True)
        run_jobs([probe_job(settings, name) for name in RUNS])
        result = draw(settings)
    seconds = time.monotonic() - started
    asked = {"steps": settings.steps, "seed": settings.seed, "simreg": list(settings.simreg)}
    facts = {"settings": asked, "seconds": seconds, **result}
    (settings.output / RESULT).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    print(table_of(result["runs"]))
    print(
        "One seed, and the baseline was not tuned: docs/evidence.md compares tuned ones.\n"
        f"In {settings.output}: {CURVES}, {HEATMAPS}, {RESULT}, the logs. It took {seconds / 60:.0f} minutes. Next:\n"
        f"  .venv/bin/simreg-megatron curves {settings.output / CROSS_ENTROPY} {settings.output / SIMREG}\n"
        "  .venv/bin/simreg-megatron doctor --script pretrain_gpt.py"
    )


def make_room(settings: Settings) -> None:
    """Empty the output folder of an earlier demo, and of nothing else."""
    output = settings.output
    if any(path.name != lock.NAME for path in output.iterdir()) and not (output / MARK).is_file():
        raise LaunchError(f"{output} has files that no demo wrote: empty it, or give another --output")
    for name in RUNS:
        shutil.rmtree(output / name, ignore_errors=True)
    (output / MARK).write_text(json.dumps({"simreg": list(settings.simreg)}) + "\n", encoding="utf-8")


def print_progress(job: Job, line: str) -> None:
    """Print what a line of Megatron's log says of the losses."""
    if iteration := _ITERATION.search(line):
        losses = re.findall(r"(?:^|\| )(lm loss|simreg loss): +(\S+)", line)
        values = ", ".join(f"{name} {float(value):.4g}" for name, value in losses)
        print(f"{job.name:<13} step {iteration[1]:>4}  {values}", flush=True)
    elif evaluation := _VALIDATION.match(line):
        print(f"{job.name:<13} step {evaluation[1]:>4}  validation loss {float(evaluation[2]):.4f}", flush=True)


def probe_job(settings: Settings, name: str) -> Job:
    """Read a model's hidden states of one validation text, early and at the end: the run's flags, another script."""
    os.environ.setdefault("WORLD_SIZE", "1")  # as torchrun sets it
    options, words = make_parser("llama").parse_known_args(settings.training_flags(name))
    plan = build_plan("llama", options, words, look_at_machine(), environ=os.environ)
    folder = settings.output / name
    own = ["--load", str(folder / "checkpoints"), "--finetune", "--no-load-optim", "--no-load-rng"]
    own += ["--probe-output", str(folder / "hidden.npz"), "--probe-steps", f"{settings.early},{settings.steps}"]
    command = [*TORCHRUN, "-m", "simreg_megatron", str(PROBE_SCRIPT), *plan.arguments, *own]
    environment = {**plan.environment, **ONE_CORE, "PYTHONPATH": python_path(ROOT)}
    return Job(f"{name} probe", command, folder / "probe.txt", environment)


def draw(settings: Settings) -> dict[str, Any]:
    """Draw curves and heat-maps; return the numbers in them."""
    title = f"Tiny LLaMA, {' '.join(settings.simreg)}, seed {settings.seed}"
    runs = [curves.read_run(settings.output / name) for name in RUNS]
    curves.draw_curves(runs, title=title).savefig(settings.output / CURVES)
    states = [
        read_hidden_states(settings.output / name / f"hidden-{step}.npz", f"{name}, step {step}")
        for step in sorted({settings.early, settings.steps})
        for name in RUNS
    ]
    draw_heatmaps(states, columns=len(RUNS), title="Hidden states of one text").savefig(settings.output / HEATMAPS)
    for name in RUNS:
        for old in sorted((settings.output / name / "checkpoints").glob("iter_*"))[:-1]:
            shutil.rmtree(old)
    return {
        "runs": {
            run.name: {
                "validation_loss": run.last(curves.VALIDATION_LOSS),
                "simreg_loss": run.mean_of_end(curves.SIMREG_LOSS),
                "mean_cosine": run.mean_of_end(curves.NEGATIVE_COSINE),
            }
            for run in runs
        },
        "heatmaps": {each.name: mean_cosines(excerpt(each))._asdict() for each in states},
    }


def table_of(runs: dict[str, dict[str, float | None]]) -> str:
    """Compare both runs, the difference in the last line."""
    first, other = (runs[name] for name in RUNS)
    rows = {**runs, "difference": {name: other[name] - first[name] for name in first}}  # type: ignore[operator]
    lines = ["", f"{'':15} {'validation loss':>15}   {'simreg loss':>11}   {'cosine of other labels':>22}"]
    for name, row in rows.items():
        sign = "+" if name == "difference" else ""
        loss, term, cosine = (row[key] for key in ("validation_loss", "simreg_loss", "mean_cosine"))
        lines.append(f"{name:15} {loss:{sign}15.4f}   {term:{sign}11.4g}   {cosine:{sign}22.4f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
