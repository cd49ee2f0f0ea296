# SPDX-License-Identifier: Apache-2.0
"""Start a run on every rank: read the command, look at the machine, prepare the data, train.

The choices are made in `launch.plan`. Every rank executes this file; only the first one prints.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from launch import checkpoints, lock, preflight, record, signals
from launch.data import check_data, drop_unusable_indices, prefixes
from launch.dry_run import describe
from launch.flags import LaunchError, flag_names, flag_number, flag_value
from launch.options import TINY, make_parser
from launch.plan import BUILTIN_CORPUS, build_plan
from launch.planned import Machine, Plan, look_at_machine, resumed
from simreg_megatron.tools.tokens import DataError, explain_missing, is_pair


def main(family: str) -> None:
    """Launch from sys.argv: plan, print, prepare the data, run. Errors for the user end with status 2."""
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():  # python launch/pretrain_llama.sh: a job of one rank
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")  # a free one
    signal.signal(signal.SIGINT, _interrupt_once)
    try:
        _launch(family, sys.argv[1:])
    except (LaunchError, DataError) as error:
        _fail(error)
    except KeyboardInterrupt:
        _say("Stopped before training began.")
        raise SystemExit(130) from None


def _launch(family: str, argv: Sequence[str]) -> None:
    try:
        options, words = make_parser(family).parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise LaunchError(str(error)) from None
    machine = look_at_machine()
    if options.dry_run:
        machine = _assume_gpus(machine, options.model, words)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    plan = build_plan(family, options, words, machine, environ=os.environ, stamp=stamp)
    if options.dry_run:
        _preview(plan, options, machine)
        return
    if options.auto_resume and record.has_ended(plan):
        _say(f"> {plan.output}: {record.length(plan)} are done, so there is nothing to do")
        _say_each("> ", record.changes_of_flags(plan))
        return
    _check(plan, options, machine)
    with _alone(plan):
        if plan.builtin_corpus:
            from simreg_megatron.tools.builtin_corpus import ensure_builtin_corpus

            ensure_builtin_corpus(BUILTIN_CORPUS)
        if options.auto_resume:
            plan = _go_on(plan)
        if os.environ["RANK"] == "0":
            _say_each("> ", drop_unusable_indices(plan.flags))
        if os.environ["RANK"] == "0" and plan.save:
            _say_each("> ", record.changes_of_flags(plan))
            record.write(plan, stamp, environ=os.environ)
        signals.listen(plan.flags)
        signals.bind_managers()
        _say(f"> TensorBoard: tensorboard --logdir {shlex.quote(str(plan.output))}")
        _train(plan)  # ends the process if training stops before its end
        if options.auto_resume and os.environ["RANK"] == "0":
            record.mark_ended(plan)


def _check(plan: Plan, options: argparse.Namespace, machine: Machine) -> None:
    """Refuse what can be refused before anything is written to the run's folder."""
    _say_each("> ", plan.notes)
    begins = continued(plan)[0] if options.auto_resume else plan
    preflight.check_load(begins.flags)
    if not options.auto_resume:
        _refuse_to_overwrite(plan)
    _say_each("> ", check_text(plan, may_miss=False))
    _prepare(plan)
    preflight.check_with_megatron(begins, machine, trains=True)


def _preview(plan: Plan, options: argparse.Namespace, machine: Machine) -> None:
    """Print the dry run; text that is not here may be where this machine does not see it."""
    begins, newest = continued(plan) if options.auto_resume else (plan, None)
    preflight.check_load(begins.flags)
    answer = preflight.check_with_megatron(begins, machine)
    _say(describe(begins, machine, environ=os.environ, resumes=newest))
    if options.auto_resume and record.has_ended(plan):
        _say(f"# note      the run itself would do nothing: {record.length(plan)} are done")
    if answer and answer.objection:
        _say(f"# note      on this machine, without a GPU, Megatron would refuse these flags: {answer.objection}")
    _say_each("# note      ", check_text(plan, may_miss=True))


def check_text(plan: Plan, *, may_miss: bool) -> list[str]:
    """Check the text of a run and return notes; text that is not on this machine is one of them if `may_miss`."""
    if plan.builtin_corpus:
        return []
    missing = [prefix for prefix in prefixes(plan.flags) if not is_pair(prefix)]
    if missing and may_miss:
        return [f"the run itself would be refused on this machine: {explain_missing(prefix)}" for prefix in missing]
    return check_data(plan.flags)


def continued(plan: Plan) -> tuple[Plan, int | None]:
    """Return the plan as it continues from its newest complete checkpoint, and the iteration; None without one."""
    newest = checkpoints.newest_whole(plan.save or Path())
    return (plan if newest is None else resumed(plan)), newest


def _alone(plan: Plan) -> AbstractContextManager[None]:
    """Let the first rank hold the folders that the run writes to, for all of them.

    That of the checkpoints too if it is below the other: a run with another --output may name it in its --save.
    """
    save = plan.save or plan.output
    folders = [plan.output] if save.resolve() == plan.output.resolve() else [plan.output, save]
    minutes = flag_number(plan.flags, "--distributed-timeout-minutes", round(lock.COLLECTIVE_SECONDS / 60))
    return lock.held(*folders, collective=60.0 * minutes) if os.environ["RANK"] == "0" else nullcontext()


def _train(plan: Plan) -> None:
    import torch

    from simreg_megatron.__main__ import run

    device = "cpu" if plan.on_cpu else torch.cuda.get_device_name()
    _say(f"> Trains on {device} in {plan.number_type}")  # research/run.py reads this line
    if plan.on_cpu and plan.model == TINY and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # more make a tiny step slower, and several times slower on a busy machine
        _say("> One thread a rank: OMP_NUM_THREADS sets another number")
    try:
        run([str(plan.script), *plan.arguments], plain=plan.plain)
    except KeyboardInterrupt:
        save = plan.save or Path("/nowhere")
        newest = checkpoints.newest_whole(save)
        last = "none was saved" if newest is None else str(checkpoints.path_of(save, newest))
        _say(f"Stopped. Last checkpoint: {last}")
        raise SystemExit(130) from None
    except AssertionError as error:
        if "OptimizerParamScheduler" not in str(error):
            raise
        raise LaunchError(
            f"the checkpoint has another learning-rate schedule ({error}): add --override-opt_param-scheduler to take "
            "the new one, or --use-checkpoint-opt_param-scheduler to keep the checkpoint's"
        ) from None
    except FileNotFoundError as error:
        cache = flag_value(plan.flags, "--data-cache-path")
        if cache is None or Path(cache) not in Path(error.filename or "/").parents:
            raise
        raise LaunchError(
            f"{error.filename}, which the first rank has written, is not on this node: give an --output on a disk that "
            "all nodes share"
        ) from None


def _interrupt_once(*_: object) -> None:
    """Ignore the second Ctrl-C: torchrun passes it on to processes that had it from the terminal already."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _go_on(plan: Plan) -> Plan:
    """Resume from the newest complete checkpoint; the first rank, which holds the folder, repairs it first.

    The others need not wait: what is deleted was never complete, and Megatron reads the folder when all have met.
    """
    _say_each("> ", checkpoints.repair(plan.save or Path()) if os.environ["RANK"] == "0" else [])
    plan, newest = continued(plan)
    if newest is not None:
        _say(f"> resuming from iteration {newest} in {plan.save}")
    return plan


def _assume_gpus(machine: Machine, model: str, words: Sequence[str]) -> Machine:
    """Plan a real size on a login node as for a node with one GPU a rank and Transformer Engine."""
    from simreg_megatron.cpu import backend as cpu_backend

    if machine.gpus or model == TINY or cpu_backend.requested(list(words)):
        return machine
    _say("# no GPU here: planned as if every rank had one and Transformer Engine were installed")
    return replace(machine, gpus=machine.local_world_size, transformer_engine=True)


def _refuse_to_overwrite(plan: Plan) -> None:
    """Refuse to start over a checkpoint, also if its tracker file is missing: a kill in a save may leave none."""
    target = flag_value(plan.flags, "--save")
    if target is None:
        return
    is_there = (Path(target) / checkpoints.TRACKER).is_file() or checkpoints.newest_whole(Path(target)) is not None
    if "--load" not in flag_names(plan.flags) and is_there:
        instead = "resume it with --auto-resume, or give another --output"
        raise LaunchError(f"{target} has checkpoints of an earlier run: {instead}")


def _prepare(plan: Plan) -> None:
    """Set environment and import path, then the CPU's stand-ins, before anything imports Megatron."""
    for name, value in plan.environment.items():
        os.environ.setdefault(name, value)
    preflight.use_tree(plan.tree)
    if not plan.on_cpu:
        return
    from simreg_megatron.cpu import backend as cpu_backend

    try:
        cpu_backend.activate(cpu_backend.requested(plan.arguments) or "on")
    except cpu_backend.CpuBackendError as error:
        raise LaunchError(str(error)) from None
    except ImportError as error:
        raise preflight.without_megatron(error) from None


def _say(text: str) -> None:
    if os.environ["RANK"] == "0":
        print(text, flush=True)


def _say_each(mark: str, notes: Sequence[str]) -> None:
    for note in notes:
        _say(f"{mark}{note}")


def _fail(error: Exception) -> NoReturn:
    """Print the error once per machine: what is missing may differ between machines."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        of_several = os.environ.get("WORLD_SIZE", "1") != os.environ.get("LOCAL_WORLD_SIZE", "1")
        where = f"{os.uname().nodename}: " if of_several else ""
        print(f"error: {where}{error}", file=sys.stderr, flush=True)
    raise SystemExit(2)
