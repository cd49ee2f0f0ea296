# SPDX-License-Identifier: Apache-2.0
"""`bash launch/slurm/submit.sh`: check a run where it is submitted, write its job, and give that to sbatch.

`--dry-run` prints the very text that would be submitted, and nothing else to standard output.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launch import checkpoints, preflight, record, sizes
from launch.dry_run import facts_of, vocabulary_of
from launch.estimate import gpu_memory
from launch.flags import LaunchError, flag_names, flag_number, flag_value
from launch.launcher import check_text, continued
from launch.options import TINY, layout_names, make_parser, read_layout
from launch.plan import build_plan
from launch.planned import ROOT, Machine, Plan
from launch.slurm.chain import STOP
from launch.slurm.job import DEFAULT, Job, Site, read_site, render
from simreg_megatron.tools.tokens import DataError


def make_submit_parser() -> argparse.ArgumentParser:
    """Make the parser of the options that go before the script."""
    parser = argparse.ArgumentParser(
        prog="launch/slurm/submit.sh",
        usage="bash launch/slurm/submit.sh [options] launch/pretrain_{llama|mixtral|hybrid}.sh [its options]",
        description="Submit a run to SLURM as a chain of jobs, each of which resumes, until the run is done.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    add = parser.add_argument
    add("--cluster", type=Path, default=DEFAULT, metavar="FILE", help="settings of your cluster")
    add("--nodes", type=int, metavar="N", help="nodes (default: those of the model's layout)")
    add("--time", metavar="TIME", help="length of one slice, in sbatch's notation (default: cluster's)")
    add("--slices", type=int, default=100, metavar="N", help="at most N slices (default: 100)")
    add("--keep", type=int, default=3, metavar="N", help="keep the newest N checkpoints (default: 3)")
    add("--reserve", type=float, default=10, metavar="MINUTES", help="kept at a slice's end to save (default: 10)")
    add("--name", help="of the job (default: from the output folder)")
    add("--dry-run", action="store_true", help="print the text that would be submitted, and stop")
    return parser


_EPILOG = f"""Options of this command go before the script, the run's own after it.
The chain is one job array: `scancel JOB` ends it at once, `touch OUTPUT/{STOP}` after a last save."""


def main() -> None:
    try:
        job, options, plan, machine = prepare(sys.argv[1:], dict(os.environ))
        notes, args = _ask_megatron(job.site, plan, machine)
        for note in notes:
            print(f"> note: {note}", file=sys.stderr)
        facts = [f"{name:<9} {value}" for name, value in facts_of(plan, machine).items()]
        facts += [*memory_of(plan, job, args), disk_of(plan, job)]
        text = render(job)
        if options.dry_run:
            sys.stdout.write(text)
        else:
            _submit(job, text)
        for line in facts:
            print(f"> {line}" if options.dry_run else f"  {line}", file=sys.stderr if options.dry_run else sys.stdout)
    except (LaunchError, DataError, argparse.ArgumentError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _ask_megatron(site: Site, plan: Plan, machine: Machine) -> tuple[list[str], argparse.Namespace | None]:
    """Ask Megatron about the flags, and return notes for the user and its arguments; None if it cannot be asked.

    The installed one has the last word, by a LaunchError, only if no container brings its own.
    """
    try:
        answer = preflight.check_with_megatron(continued(plan)[0], machine)
    except LaunchError as error:
        if site.runtime == "venv":
            raise
        return [f"in a container with this machine's Megatron the run would be refused: {error}"], None
    if answer is None:
        return [
            f"{sys.executable} has no Megatron to ask, so its flags are not checked here, and a misspelt one ends the "
            "job when it begins: activate an environment with torch and megatron-core to check them"
        ], None
    objection, args = answer
    return [f"on this machine Megatron would refuse these flags: {objection}"] if objection else [], args


def prepare(argv: Sequence[str], environ: dict[str, str]) -> tuple[Job, argparse.Namespace, Plan, Machine]:
    """Make the job that is asked for, checked as far as this machine can; a LaunchError if it could not run."""
    job_words, family, words = _split(argv)
    parser = make_submit_parser()
    options = parser.parse_args(job_words)
    if min(1 if options.nodes is None else options.nodes, options.slices, options.keep) < 1:
        raise LaunchError("--nodes, --slices and --keep must be at least 1")
    site = read_site(options.cluster, environ)
    if tree := site.environment.get("MEGATRON_PATH") or environ.get("MEGATRON_PATH", ""):
        site = replace(site, environment={**site.environment, "MEGATRON_PATH": tree})  # sbatch may not pass it on
    if site.runtime != "venv" and not Path(tree).is_dir():
        tree = ""  # in the container only, where this machine cannot ask it
    run_options, rest = make_parser(family).parse_known_args(words)
    if misplaced := [word for word in words if word.partition("=")[0] in parser._option_string_actions]:
        raise LaunchError(f"put {misplaced[0]} before the script: there it is the job's")
    model = run_options.model
    if run_options.layout is None and model != TINY and site.gpus_per_node and site.layout:
        run_options.layout = site.layout
        words = ["--layout", site.layout, *words]
    if site.runtime == "venv" and not site.python and importlib.util.find_spec("torch") is None:
        raise LaunchError(
            f"the job would run {sys.executable}, which has no torch: activate the environment of the run before you "
            f"submit, or name its Python in {options.cluster} (PYTHON=)"
        )
    time = options.time or site.time
    if not 0 < options.reserve <= _minutes(time) - 1:
        raise LaunchError(f"--reserve {options.reserve:g} must be above 0 and leave a minute of --time {time}")
    nodes = options.nodes or _nodes_of(run_options.layout, family, model)
    run_options.auto_resume = True
    gpus, ranks = site.gpus_per_node, site.ranks_per_node
    machine = Machine(gpus, bool(gpus), world_size=nodes * ranks, local_world_size=ranks, whole_nodes=True)
    plan = build_plan(family, run_options, rest, machine, environ={**environ, "MEGATRON_PATH": tree})
    _check(plan)
    _check_data(plan, site, previews=options.dry_run)
    output = plan.output.absolute()
    for note in plan.notes:
        print(f"> {note}", file=sys.stderr)
    job = Job(
        # The same for the same run, by which a second submission is seen.
        name=f"{options.name or output.name}-{hashlib.sha256(str(output).encode()).hexdigest()[:6]}",
        nodes=nodes,
        time=time,
        slices=options.slices,
        keep=options.keep,
        reserve=round(options.reserve * 60),
        output=output,
        save=(plan.save or Path()).absolute(),
        train=(str(ROOT / "launch" / f"pretrain_{family}.sh"), *words, "--auto-resume"),
        site=site,
    )  # fmt: skip
    return job, options, plan, machine


def _minutes(time: str) -> float:
    """Read minutes[:seconds], hours:minutes:seconds or days-hours[:minutes[:seconds]]; a word has no limit."""
    days, dash, clock = time.rpartition("-")
    words = [*(["0"] if not dash and clock.count(":") < 2 else []), *clock.split(":"), "0", "0"]
    if not all(map(str.isdecimal, [days or "0", *words])):
        return math.inf
    return 1440 * int(days or 0) + 60 * int(words[0]) + int(words[1]) + int(words[2]) / 60


def _split(argv: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """Cut the command line into our own options, the script's family, and the script's words."""
    if {"-h", "--help"} & set(argv[:1]):
        make_submit_parser().parse_args(["--help"])
    for place, word in enumerate(argv):
        if match := re.fullmatch(r"(?:.*/)?pretrain_(llama|mixtral|hybrid)\.sh", word):
            return list(argv[:place]), match[1], list(argv[place + 1 :])
    raise LaunchError(
        "name what to run: launch/pretrain_llama.sh, pretrain_mixtral.sh or pretrain_hybrid.sh, then its options"
    )


def _nodes_of(layout: str | None, family: str, model: str) -> int:
    if layout:
        return flag_number(read_layout(layout, family, model), "--nodes", 1)
    if model == TINY:
        return 1
    raise LaunchError(f"how many nodes? give --nodes N before the script, or --layout {'|'.join(layout_names())}")


def _check(plan: Plan) -> None:
    if record.has_ended(plan):
        done = f"{plan.output}: {record.length(plan)} are done"
        raise LaunchError(f"{done}: ask for more, or give another --output")
    if "--skip-train" in flag_names(plan.flags):
        raise LaunchError("a chain of slices trains: start an evaluation with torchrun, without submit.sh")
    if "--save-retain-interval" in flag_names(plan.flags):
        raise LaunchError("--keep N deletes what --save-retain-interval keeps: leave it out")
    if checkpoints.is_there(plan.output / STOP):
        raise LaunchError(f"{plan.output / STOP} stops every slice: remove it first")


def _check_data(plan: Plan, site: Site, *, previews: bool) -> None:
    """Check the text before hours in a queue; in a container the paths may be other ones."""
    if site.runtime == "venv":
        preflight.check_load(continued(plan)[0].flags)
    try:
        notices = check_text(plan, may_miss=previews or site.runtime != "venv")
    except ImportError as error:
        notices = [
            f"note: {sys.executable} has no {error.name}, so the data is not checked here: activate the environment of "
            "the run to check it"
        ]
    for notice in notices:
        print(f"> {notice}", file=sys.stderr)


def memory_of(plan: Plan, job: Job, args: argparse.Namespace | None) -> list[str]:
    """Return Megatron's estimate of a GPU's memory as a line, if it has one."""
    memory = gpu_memory(args, vocabulary_of(plan)) if args and job.site.gpus_per_node else None
    if memory is None:
        return []
    weights, activations = memory
    total = f"{weights + activations:,.1f} GiB of a GPU's {job.site.gpu_memory}, by Megatron's estimate"
    return [f"memory    {total} ({weights:,.1f} of weights and optimizer and {activations:,.1f} of activations)"]


def disk_of(plan: Plan, job: Job) -> str:
    """Return the size of the run's checkpoints as a line."""
    size = sizes.checkpoint_bytes(plan.flags, vocabulary=vocabulary_of(plan)) / 2**30
    existing = next(path for path in (job.save, *job.save.parents) if path.exists())
    free = shutil.disk_usage(existing).free / 2**30
    if (kind := flag_value(plan.flags, "--ckpt-format") or "torch_dist") != "torch_dist":
        return f"disk      {size:,.1f} GiB a checkpoint, and --keep deletes none of {kind}; {free:,.1f} GiB are free"
    needed = f"{(job.keep + 1) * size:,.1f} GiB for {job.keep} and one being written"
    return f"disk      {size:,.1f} GiB a checkpoint, {needed}; {free:,.1f} GiB are free"


def _submit(job: Job, text: str) -> None:
    queue = _run(["squeue", "--noheader", "--me", "--format", "%i %T %j"])  # its --name takes a comma for a list
    if running := [line for line in queue.splitlines() if line.endswith(job.name[-7:])]:
        raise LaunchError(f"this run is in the queue already ({running[0]}): scancel it first")
    folder = job.output / "slurm"
    path = folder / "job.sbatch"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (job.output / record.ENDED).unlink(missing_ok=True)  # of a shorter run that continues now
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)  # for this user only: the settings of a cluster may hold a key
    except OSError as error:
        raise LaunchError(f"{error.filename} cannot be written ({error.strerror}): give another --output") from None
    # On the command line as well: a variable such as SBATCH_TIMELIMIT would replace what the script's head says.
    directives = [shlex.split(line)[1] for line in text.splitlines() if line.startswith("#SBATCH ")]
    number = _run(["sbatch", "--parsable", *directives, str(path)]).partition(";")[0]
    print(f"submitted {job.name} as job {number}, at most {job.slices} slices of {job.time} on {job.nodes} nodes")
    print(f"  logs   {folder}/{number}_*.log")
    print(f"  stop   touch {job.output / STOP}   (saves first)      scancel {number}   (at once)")


def _run(command: list[str]) -> str:
    env = {name: value for name, value in os.environ.items() if name == "SLURM_CONF" or not name.startswith("SLURM_")}
    try:  # in the shell of an allocation SLURM_* would change the request
        return subprocess.run(command, check=True, text=True, capture_output=True, env=env).stdout.strip()
    except FileNotFoundError:
        raise LaunchError(f"{command[0]} is not on this machine: submit from a login node of the cluster") from None
    except subprocess.CalledProcessError as error:
        raise LaunchError(f"{command[0]} refused: {error.stderr.strip()}") from None


if __name__ == "__main__":
    main()
