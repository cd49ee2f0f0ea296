# SPDX-License-Identifier: Apache-2.0
"""What the launch scripts start on every rank: read the command, look at the machine, prepare the data, run.

The choices are made in `launch.plan`. Every rank executes this file; only the first one speaks.
"""

from __future__ import annotations

import argparse
import errno
import os
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib import util
from pathlib import Path
from typing import Any, NoReturn

from launch import checkpoints, lock, orphans, preflight, progress, quiet, record, signals, sizes
from launch.data import check_data, explain_missing, prefixes
from launch.dry_run import describe, vocabulary_of
from launch.flags import LaunchError, flag_name, flag_names, flag_number, flag_value
from launch.plan import (
    BUILTIN_CORPUS,
    NO_DATA,
    RECIPES,
    TINY,
    Corpus,
    Machine,
    Plan,
    build_plan,
    layout_names,
    missing_kernels,
    model_names,
    resumed,
    with_stand_ins,
)
from launch.schedule import check_schedule
from simreg_megatron.installed import broken_transformer_engine
from simreg_megatron.tools.indexed import is_pair


def make_parser(family: str) -> argparse.ArgumentParser:
    """The launcher's own options; it knows none of Megatron's."""
    script = f"launch/pretrain_{family}.sh"
    parser = argparse.ArgumentParser(
        prog=script,
        usage=f"{{torchrun [TORCHRUN FLAGS] | bash}} {script} [--model NAME] [options] [Megatron flags]",
        description=f"Pretrain a {family.capitalize()} model with Megatron; --simreg-lambda 1 adds SimReg.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--model", type=str.lower, choices=model_names(family), help="preset (default: tiny)")
    parser.add_argument(
        "--recipe",
        choices=RECIPES,
        help="one run of the paper's tables: AdaGC, and this objective; paper is SimReg on chunks, paper-full on whole "
        "sequences (default: neither)",
    )
    parser.add_argument("--plain", action="store_true", help="leave the plugin out: Megatron alone, to compare with")
    text = "your tokenized text, of PREFIX.bin and PREFIX.idx; several with a WEIGHT before each"
    parser.add_argument("--data", nargs="+", metavar="PREFIX", help=text)
    parser.add_argument("--valid-data", nargs="+", metavar="PREFIX", help="validation text (default: 1 %% of --data)")
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="its tokenizer: a .model file, or a Hugging Face folder or name"
    )
    parser.add_argument("--ffn", metavar="SIZE", default="literal", help="FFN size: literal, aligned or a number")
    parser.add_argument("--output", metavar="DIR", type=Path, help="for TensorBoard and checkpoints (default: runs/)")
    parser.add_argument(
        "--layout", metavar="NAME", help=f"layout of the model for a kind of machine: {', '.join(layout_names())}"
    )
    parser.add_argument(
        "--auto-resume",
        action="store_true",
        help="resume from the newest complete checkpoint of the run, if there is one; do nothing if the run has ended",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the exact command and what would run, and stop")
    parser.add_argument(
        "--verbose", action="store_true", help="show everything that Megatron prints, for the tiny model too"
    )
    return parser


_EPILOG = """Without --data the tiny model trains on a corpus that is built here, without a download.
--ffn: literal is the preset's size; aligned is the nearest that can be split and suits tensor cores.
Any other flag goes to Megatron and overrides the preset (launch/models/).
The bash form also takes torchrun's --nproc-per-node, --nnodes, --node-rank, --master-addr, --master-port and
--rdzv-*, or NPROC_PER_NODE (default: the GPUs, or 1), NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT from the
environment. MEGATRON_PATH set: that source tree's pretrain_gpt.py runs."""


_ELSEWHERE = "give another --output; earlier checkpoints are kept, and --auto-resume resumes from them"


def main(family: str) -> None:
    """Launch from sys.argv: plan, print, prepare the data, run. Errors for the user end with status 2."""
    _alone_without_torchrun()
    signal.signal(signal.SIGINT, _interrupt_once)
    try:
        _launch(family, sys.argv[1:])
    except LaunchError as error:
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
        machine = assume_gpus(machine, options.model or TINY, words)
        options = with_stand_ins(options, words)
    stamp = time.strftime("%Y%m%d-%H%M%S")

    def planned(corpus: Corpus | None = None) -> Plan:
        return build_plan(family, options, words, machine, environ=os.environ, corpus=corpus, stamp=stamp)

    plan = planned()
    if options.dry_run:
        _preview(plan, options, machine)
        return
    if options.auto_resume and progress.has_ended(plan):
        _say(f"> {plan.output}: {progress.length(plan)} are done, so there is nothing to do")
        return
    _check(plan, options, machine)
    with _alone(plan):
        plan = planned(_build_corpus() if plan.builtin_corpus else None)
        if options.auto_resume:
            plan = _go_on(plan)
        if os.environ["RANK"] == "0" and flag_value(plan.flags, "--save"):
            _record(plan, stamp)
        signals.listen(plan.flags)
        orphans.bind_managers()
        _say(f"> TensorBoard: tensorboard --logdir {shlex.quote(str(plan.output))}")
        _train(plan, verbose=options.verbose)  # ends the process where training stops before its end
        if options.auto_resume and os.environ["RANK"] == "0":
            progress.mark_ended(plan)


def _check(plan: Plan, options: argparse.Namespace, machine: Machine) -> None:
    """Whatever can be refused is refused before anything is written to the run's folder."""
    for note in (*plan.notes, *missing_kernels(plan, machine)):
        _say(f"> {note}")
    preflight.check_output(plan.output)
    preflight.check_load(plan.flags)
    preflight.check_writers(plan.flags)
    if not options.auto_resume:
        _refuse_to_overwrite(plan)
    if not plan.builtin_corpus:
        _tell(check_data(plan.flags))
    _prepare(plan)
    with quiet.quiet_output(verbose=options.verbose or plan.model != TINY):
        check_with_megatron(continued(plan)[0] if options.auto_resume else plan, machine, trains=True)


def _preview(plan: Plan, options: argparse.Namespace, machine: Machine) -> None:
    """What a dry run says; text that is not here may lie where this machine does not see it."""
    preflight.check_output(plan.output)
    preflight.check_load(plan.flags)
    begins, newest = continued(plan) if options.auto_resume else (plan, None)
    answer = check_with_megatron(begins, machine)
    _say(describe(begins, machine, environ=os.environ, resumes=newest))
    if options.auto_resume and progress.has_ended(plan):
        _say(f"# note      the run itself would do nothing: {progress.length(plan)} are done")
    if answer and answer.objection:
        _say(f"# note      on this machine, without a GPU, Megatron would refuse these flags: {answer.objection}")
    missing = missing_data(plan)
    if not missing and not plan.builtin_corpus:
        _tell(check_data(plan.flags))
    for note in missing:
        _say(f"# note      {note}")


def missing_data(plan: Plan) -> list[str]:
    """Return a note for each text of the run that is not on this machine, for a dry run."""
    missing = [] if plan.builtin_corpus else [prefix for prefix in prefixes(plan.flags) if not is_pair(prefix)]
    reasons = ("no --data is given" if prefix == NO_DATA else explain_missing(prefix) for prefix in missing)
    return [f"the run itself would be refused on this machine: {reason}" for reason in reasons]


def continued(plan: Plan) -> tuple[Plan, int | None]:
    """Return the plan as it continues from its newest complete checkpoint, and the iteration; None without one."""
    newest = checkpoints.newest_whole(Path(flag_value(plan.flags, "--save") or ""))
    return (plan if newest is None else resumed(plan)), newest


def _alone(plan: Plan) -> AbstractContextManager[None]:
    """The first rank holds the folders that the run writes to, for all of them.

    That of the checkpoints too where it lies below: a run with another --output may name it in its --save.
    """
    save = Path(flag_value(plan.flags, "--save") or plan.output)
    folders = [plan.output] if save.absolute() == plan.output.absolute() else [plan.output, save]
    minutes = flag_number(plan.flags, "--distributed-timeout-minutes", round(lock.COLLECTIVE_SECONDS / 60))
    return lock.held(*folders, collective=60.0 * minutes) if os.environ["RANK"] == "0" else nullcontext()


def _train(plan: Plan, *, verbose: bool) -> None:
    import torch
    from torch.distributed.checkpoint.api import CheckpointException

    from simreg_megatron.__main__ import run

    device = "cpu" if plan.on_cpu else torch.cuda.get_device_name()
    _say(f"> Trains on {device} in {plan.number_type}")  # research/run.py reads this line
    if plan.on_cpu and plan.model == TINY and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # more make a tiny step slower, and several times slower on a busy machine
        _say("> One thread a rank: OMP_NUM_THREADS sets another number")
    try:
        with quiet.quiet_output(verbose=verbose or plan.model != TINY):
            run([str(plan.script), *plan.arguments], plain=plan.plain)
    except KeyboardInterrupt:
        _stopped(Path(flag_value(plan.flags, "--save") or "/nowhere"))
    except (OSError, CheckpointException) as error:
        told = _of_a_disk(error, plan) if isinstance(error, OSError) else _of_a_checkpoint(error.failures, plan)
        if told is None:
            raise
        raise LaunchError(told) from None


def _of_a_checkpoint(failures: Mapping[int, tuple[BaseException, Any]], plan: Plan) -> str | None:
    """Why torch could not write one, as its ranks met it; where the disk is full its writer says "unexpected pos"."""
    for failure, _ in failures.values():
        told = _of_a_disk(failure, plan) if isinstance(failure, OSError) else None
        if told is not None:
            return told
    folder = Path(flag_value(plan.flags, "--save") or plan.output)
    free = shutil.disk_usage(folder).free
    need = checkpoints.size(folder) or sizes.checkpoint_bytes(plan.flags, vocabulary=vocabulary_of(plan))
    if free > need:
        return None
    return (
        f"a checkpoint in {folder} could not be written: {free / 2**20:,.0f} MiB are free there, and it takes "
        f"some {need / 2**20:,.0f}: free some space or {_ELSEWHERE}"
    )


def _of_a_disk(error: OSError, plan: Plan) -> str | None:
    """What a file or folder refused, and the way out of it; None if the error is of another kind."""
    where = Path(os.fsdecode(error.filename or flag_value(plan.flags, "--save") or plan.output))
    else_where = "give --data-cache-path DIR for Megatron's own files" if _is_beside_text(where, plan) else _ELSEWHERE
    not_written = f"{where} could not be written ({error.strerror})"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{not_written}: free some space or {else_where}"
    if error.errno == errno.EROFS:
        return f"{not_written}: mount it for writing or {else_where}"
    if error.errno != errno.EACCES or error.filename is None:  # a socket may be forbidden, too
        return None
    if where.is_file() and not os.access(where, os.R_OK):
        return f"{where} could not be read ({error.strerror}): let this user read it, then start again"
    return f"{not_written}: let this user write there or {else_where}"


def _is_beside_text(where: Path, plan: Plan) -> bool:
    """Where Megatron keeps its index of the text, if nobody names another folder."""
    names = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")
    texts = {Path(word).absolute().parent for flag in plan.flags if flag_name(flag) in names for word in flag[1:]}
    own = plan.output.absolute() in where.absolute().parents
    return not own and bool(texts & set(where.absolute().parents))


def _interrupt_once(*_: object) -> None:
    """torchrun passes Ctrl-C on to processes that had it from the terminal already."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _stopped(save: Path) -> NoReturn:
    """After Ctrl-C: which training is kept."""
    newest = checkpoints.newest_whole(save)
    last = "none was saved" if newest is None else str(checkpoints.path_of(save, newest))
    _say(f"Stopped. Last checkpoint: {last}")
    raise SystemExit(130) from None


def check_with_megatron(plan: Plan, machine: Machine, *, trains: bool = False) -> preflight.Answer | None:
    """Ask Megatron about the run's flags, and compare its schedule with that of the checkpoint it would load.

    Returns:
        What it says; None where it cannot be asked. It objects only where a run on GPUs is planned without one: some
        of its checks ask the GPU.

    Raises:
        LaunchError: it would not start.
    """
    from torch.cuda import is_available

    from simreg_megatron.cpu import backend as cpu_backend

    pretends = machine.gpus > 0 and (cpu_backend.is_active() or not is_available())
    own = [option for action in make_parser(plan.family)._actions for option in action.option_strings]
    answer = preflight.check_with_megatron(
        plan.flags, options=own, tree=plan.tree, trains=trains, world_size=machine.world_size
    )
    if answer and answer.objection and not pretends:
        raise LaunchError(f"Megatron refuses these flags together: {answer.objection}")
    if answer and answer.args:
        check_schedule(answer.args)
    return answer


def _record(plan: Plan, stamp: str) -> None:
    try:
        record.write(plan, stamp, environ=os.environ)
    except OSError as error:
        _say(f"> warning: no record of this start in {plan.output} ({error.strerror}); the run continues without one")


def _go_on(plan: Plan) -> Plan:
    """From the newest complete checkpoint; the first rank, which holds the folder, brings it in order first.

    The others need not wait: what is deleted was never complete, and Megatron reads the folder when all have met.
    """
    folder = Path(flag_value(plan.flags, "--save") or "")
    try:
        sentences = checkpoints.repair(folder) if os.environ["RANK"] == "0" else []
    except OSError as error:
        raise LaunchError(
            f"{error.filename} cannot be repaired ({error.strerror}): free some space there, or make it writable"
        ) from None
    for sentence in sentences:
        _say(f"> {sentence}")
    newest = checkpoints.newest_whole(folder)
    if newest is None:
        return plan
    _say(f"> resuming from iteration {newest} in {folder}")
    return resumed(plan)


def look_at_machine() -> Machine:
    """What this process finds here.

    Raises:
        LaunchError: there is no torch, or a GPU and a Transformer Engine that cannot be imported.
    """
    try:
        gpus = _gpus()
    except ImportError:
        raise LaunchError(
            f"{sys.executable} has no torch: run `make setup`, or activate the right environment"
        ) from None
    broken = broken_transformer_engine() if gpus else None  # a run on CPUs does without it
    if broken:
        raise LaunchError(broken)
    return Machine(
        gpus=gpus,
        transformer_engine=util.find_spec("transformer_engine") is not None,
        apex_gradient_kernel=util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
        world_size=int(os.environ["WORLD_SIZE"]),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )


def _gpus() -> int:
    import torch

    from simreg_megatron.cpu import backend as cpu_backend

    return 0 if cpu_backend.is_active() else torch.cuda.device_count()  # its stand-ins would count as GPUs


def assume_gpus(machine: Machine, model: str, words: Sequence[str]) -> Machine:
    """A real size is planned on login nodes too: there, as for a node with one GPU a rank and Transformer Engine."""
    asked_for_cpu = "--simreg-cpu" in words or os.environ.get("SIMREG_CPU", "0") not in ("", "0")
    if machine.gpus or model == TINY or asked_for_cpu:
        return machine
    _say("# no GPU here: planned as if every rank had one and Transformer Engine were installed")
    return replace(machine, gpus=machine.local_world_size, transformer_engine=True)


def _alone_without_torchrun() -> None:
    """`python launch/pretrain_llama.sh` is a job of one rank."""
    if "RANK" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))


def _refuse_to_overwrite(plan: Plan) -> None:
    """Checkpoints count, not the tracker file beside them: a run that is killed in a save may lack the latter."""
    target = flag_value(plan.flags, "--save")
    if target is None:
        return
    has_tracker = (Path(target) / checkpoints.TRACKER).is_file()
    newest = checkpoints.newest_whole(Path(target))
    if "--load" not in flag_names(plan.flags):
        if has_tracker or newest is not None:
            raise LaunchError(
                f"{target} has checkpoints of an earlier run: resume it with --auto-resume, or give another --output"
            )
    elif flag_value(plan.flags, "--load") == target and newest is not None and not has_tracker:
        raise LaunchError(
            f"{target} has a complete checkpoint of iteration {newest} and no {checkpoints.TRACKER}, so Megatron would "
            "start at step 0 and overwrite it: resume with --auto-resume, which writes that file"
        )


def _prepare(plan: Plan) -> None:
    """Environment and import path first, then the CPU's stand-ins: nothing has imported Megatron yet."""
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


def _build_corpus() -> Corpus:
    from simreg_megatron.tools.builtin_corpus import ensure_builtin_corpus
    from simreg_megatron.tools.indexed import DataError

    try:
        return ensure_builtin_corpus(BUILTIN_CORPUS)
    except DataError as error:
        raise LaunchError(str(error)) from None


def _tell(notices: Sequence[str]) -> None:
    for notice in notices:
        _say(f"> {notice}")


def _say(text: str) -> None:
    if os.environ["RANK"] == "0":
        print(text, flush=True)


def _fail(error: LaunchError) -> NoReturn:
    """Once per machine: disks differ between machines, and so may what is missing."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        of_several = os.environ.get("WORLD_SIZE", "1") != os.environ.get("LOCAL_WORLD_SIZE", "1")
        where = f"{os.uname().nodename}: " if of_several else ""
        print(f"error: {where}{error}", file=sys.stderr, flush=True)
    raise SystemExit(2)
