# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a run before anything of it starts: flags, their values, sizes over ranks, the output folder.

The dry run, the run and the submission ask the same questions. Two need nothing but the flags and are asked while a
run is planned (`check_own_flags`, `check_layout`); two look around (`check_output`, `check_with_megatron`).
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib.util
import io
import logging
import math
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from launch import checkpoints, sizes
from launch.flags import Flag, LaunchError, flag_name, flag_names, flag_number, flag_value, flatten, group_flags

if TYPE_CHECKING:
    from simreg_megatron import SimRegConfig

_OWN = ("--simreg-", "--adagc")
_OLDEST = (0, 19)
# With one of these, stages hold unequal numbers of layers, as Megatron itself shares them out.
_UNEVEN_STAGES = {
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
    "--pipeline-model-parallel-layout",
    "--mtp-num-layers",
}


class _Refusing(argparse.ArgumentParser):
    """A parser whose complaint is one sentence, without the usage of five hundred flags before it."""

    def error(self, message: str) -> NoReturn:
        raise LaunchError(message)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise LaunchError((message or "").strip().removeprefix("error: "))


def check_own_flags(flags: Sequence[Flag]) -> SimRegConfig:
    """See that SimReg's and AdaGC's flags exist, and that their values make a configuration, as the run will.

    Returns:
        The configuration of SimReg.

    Raises:
        LaunchError: one does not; the sentence names the flag that was meant.
    """
    from simreg_megatron.config.flags import config_from_args
    from simreg_megatron.plugin.arguments import add_simreg_arguments

    parser = _Refusing(allow_abbrev=False)
    parser.add_argument("--num-layers", type=int)  # two settings of Megatron's that ours are checked with
    parser.add_argument("--clip-grad", type=float)
    add_simreg_arguments(parser)
    if flag_value(flags, "--simreg-cpu") not in (None, "", "force"):
        raise LaunchError(f"--simreg-cpu takes no value, or force, not {flag_value(flags, '--simreg-cpu')!r}")
    own = [flag for flag in flags if _is_own(flag) and flag_name(flag) != "--simreg-cpu"]
    known = [flag for flag in flags if flag_name(flag) in ("--num-layers", "--clip-grad")]
    return config_from_args(parser.parse_known_args(flatten([*own, *known]))[0])


def _is_own(flag: Flag) -> bool:
    return flag_name(flag).startswith(_OWN)


def check_writers(flags: Sequence[Flag]) -> None:
    """See that Weights & Biases is there if it is asked for: Megatron imports it on one rank, after the start.

    Raises:
        LaunchError: it is not.
    """
    if flag_value(flags, "--wandb-project") and importlib.util.find_spec("wandb") is None:
        raise LaunchError("--wandb-project needs wandb, which is not installed: pip install wandb, or drop the flag")


def check_load(flags: Sequence[Flag]) -> None:
    """Raise a LaunchError if --load names no checkpoints: Megatron would start from scratch and hardly say so."""
    folder = flag_value(flags, "--load")
    if folder is None or folder == flag_value(flags, "--save") or checkpoints.is_loadable(Path(folder)):
        return
    inside = Path(folder) / "checkpoints"
    hint = f"give {inside}" if inside.is_dir() else "give the folder that --save named"
    raise LaunchError(
        f"--load {folder}: there is no complete checkpoint, {hint}, or leave the flag out to start from scratch"
    )


def check_layout(flags: Sequence[Flag], world_size: int, node: int = 0) -> None:
    """Check that the ranks can share out layers, heads, replicas and experts.

    Args:
        node: ranks a node, if the run is submitted and the user chooses nodes.

    Raises:
        LaunchError: they cannot; the sentence names sizes that would do.
    """
    tensor, pipeline, context = sizes.model_parallel_sizes(flags)
    ranks = tensor * pipeline * context
    _check_layers(flags, pipeline)
    _check_heads(flags, tensor)
    if world_size % ranks:
        fix = f"start {max(world_size // ranks, 1) * ranks} (--nproc-per-node, --nnodes)"
        if node:
            whole = math.lcm(ranks, node)
            fix = f"give --nodes {max(world_size // whole, 1) * whole // node} before the script"
        smaller = f"give sizes whose product divides {world_size}" if world_size > 1 else "leave these sizes out"
        raise LaunchError(
            f"one replica takes TP {tensor} x PP {pipeline} x CP {context} = {ranks} ranks, and {world_size} cannot be "
            f"divided among replicas: {fix}, or {smaller}"
        )
    length = flag_number(flags, "--seq-length", 1)
    parts = tensor * (2 * context if context > 1 else 1)
    if "--sequence-parallel" in flag_names(flags) and length % parts:
        raise LaunchError(
            f"sequences of {length} tokens cannot be cut for TP {tensor} with sequence parallelism and CP {context}: "
            f"give a --seq-length that {parts} divides"
        )
    _check_experts(flags, world_size, pipeline)


def _check_layers(flags: Sequence[Flag], pipeline: int) -> None:
    layers = flag_number(flags, "--num-layers", 1)
    if flag_names(flags) & _UNEVEN_STAGES or "--num-layers" not in flag_names(flags):
        return
    if layers % pipeline:
        raise LaunchError(
            f"{layers} layers cannot be divided evenly among {pipeline} pipeline stages: give --num-layers "
            f"{layers // pipeline * pipeline or pipeline} or {-(-layers // pipeline) * pipeline}, or a "
            f"--pipeline-model-parallel-size of {_divisors(layers)}"
        )


def _check_heads(flags: Sequence[Flag], tensor: int) -> None:
    given = flag_names(flags)
    heads = flag_number(flags, "--num-attention-heads", tensor)
    if heads % tensor:
        raise LaunchError(
            f"{heads} attention heads cannot be divided among {tensor} tensor-parallel ranks: give a "
            f"--tensor-model-parallel-size of {_divisors(heads)}"
        )
    groups = flag_number(flags, "--num-query-groups", tensor)
    if "--group-query-attention" in given and heads % groups:
        raise LaunchError(
            f"{heads} attention heads cannot be divided among {groups} query groups: give --num-query-groups "
            f"{sizes.largest_divisor(heads, groups)}"
        )
    hidden = flag_number(flags, "--hidden-size", heads)
    if hidden % heads and "--kv-channels" not in given:
        raise LaunchError(
            f"--hidden-size {hidden} cannot be cut into {heads} attention heads: give --num-attention-heads "
            f"{sizes.largest_divisor(hidden, heads)}, or --kv-channels"
        )


def _check_experts(flags: Sequence[Flag], world_size: int, pipeline: int) -> None:
    experts, chosen = flag_number(flags, "--num-experts", 0), flag_number(flags, "--moe-router-topk", 1)
    if experts and chosen > experts:
        raise LaunchError(f"--moe-router-topk {chosen} is more than the {experts} experts: give at most {experts}")
    ranks = flag_number(flags, "--expert-model-parallel-size", 1)
    if ranks == 1:
        return
    if "--num-experts" not in flag_names(flags):
        raise LaunchError(f"--expert-model-parallel-size {ranks} has no experts to divide: leave it out")
    if experts % ranks:
        raise LaunchError(
            f"{experts} experts cannot be divided among {ranks} ranks: give an --expert-model-parallel-size of "
            f"{_divisors(experts)}"
        )
    together = ranks * sizes.ffn_split(flags) * pipeline
    if world_size % together:
        raise LaunchError(
            f"the experts of one model take EP {ranks} x {sizes.ffn_split(flags)} tensor-parallel x PP {pipeline} = "
            f"{together} ranks, and {world_size} are no multiple of it: give a smaller --expert-model-parallel-size"
        )


def _divisors(number: int) -> str:
    """ "1, 3, 11 or 33" """
    *rest, last = [str(size) for size in range(1, number + 1) if number % size == 0]
    return f"{', '.join(rest)} or {last}" if rest else last


def check_output(folder: Path) -> None:
    """Raise a LaunchError if a run could not write there; nothing is made."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        raise LaunchError(f"--output {folder}: {there} is a file: name a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise LaunchError(f"--output {folder}: nothing can be written in {there}: name another folder")


class Answer(NamedTuple):
    """What Megatron has against a run's flags, and its arguments if its validate_args has completed them."""

    objection: str | None
    args: argparse.Namespace | None


def check_with_megatron(
    flags: Sequence[Flag], *, options: Sequence[str], tree: Path | None, trains: bool, world_size: int
) -> Answer | None:
    """Let Megatron's own parser and checks read the flags that are its own; where it is missing, nobody can tell.

    Args:
        options: the launcher's own, which may have been meant.
        tree: a source tree of Megatron-LM that runs and is asked in place of the installed Megatron. Its script may
            add flags of its own, so that one which its parser does not know is no mistake.
        trains: whether this process goes on to train. Megatron is imported here then, and its log keeps the output
            that it finds.
        world_size: ranks of the run.

    Returns:
        What Megatron says; None where it could not be asked.

    Raises:
        LaunchError: Megatron has no such flag, or the flag takes no such value; or the installed one is too old.
    """
    if tree is None:
        _check_release()
    use_tree(tree)
    with contextlib.nullcontext() if trains else silence():
        parser = _megatrons_parser(trains=trains)
    if parser is None or "--yaml-cfg" in flag_names(flags):
        return None
    words = flatten(flag for flag in flags if not _is_own(flag))
    args, unknown = parser.parse_known_args(words)
    names = [word.partition("=")[0] for word in unknown if word.startswith("--")]
    if names and tree is None:
        hint = suggestion(names[0], [*parser._option_string_actions, *options])
        raise LaunchError(f"Megatron has no flag {names[0]}: {hint}")
    if {"--use-checkpoint-args", "--ckpt-convert-format"} & flag_names(flags):  # which bring other settings
        return None
    answer = _ask(args, world_size)
    if answer.objection is None:
        _check_own_combinations(flags, args)
    return answer


def suggestion(name: str, known: Sequence[str]) -> str:
    """What to say after an unknown flag: the one that was probably meant."""
    from simreg_megatron.config.spelling import MEANT

    word = name.removeprefix("--")
    own = {
        **MEANT,
        "fp8": "--fp8-format",
        **{each: f"--simreg-{each}" for each in ("lambda", "temperature", "chunk-size", "objective")},
    }
    near = [own[word]] if word in own else difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"did you mean {near[0]}?" if near else "leave it out, or see --help"


def _check_release() -> None:
    """See that the installed Megatron has the training loop that simreg_megatron/pretrain.py drives."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        version = metadata.version("megatron-core")
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < _OLDEST:
            raise LaunchError(
                f"the launch scripts drive the training loop of megatron-core 0.19, and {version} is installed: "
                "pip install 'megatron-core>=0.19.2,<0.20', or set MEGATRON_PATH to a source tree of your release, "
                "whose pretrain_gpt.py runs then"
            )


def use_tree(tree: Path | None) -> None:
    """Import Megatron from this source tree, if it is one."""
    if tree is not None:
        sys.path.insert(0, str(tree))


def _check_own_combinations(flags: Sequence[Flag], args: argparse.Namespace) -> None:
    """What SimReg itself refuses beside Megatron's flags, which a run tells when it has begun."""
    from simreg_megatron.plugin import refusals

    config = check_own_flags(flags)
    if not config.active:
        return
    try:
        refusals.refuse_arguments(args, config)
    except (ValueError, NotImplementedError) as error:
        raise LaunchError(str(error)) from None


def _ask(args: argparse.Namespace, world_size: int) -> Answer:
    """Find the first of the assertions that a run of Megatron begins with and these arguments do not meet."""
    from megatron.training import arguments

    config_of = getattr(arguments, "core_transformer_config_from_args", lambda args: None)  # not in every release
    args.rank, args.world_size = 0, world_size
    args._is_global_batch_size_explicitly_specified = args.global_batch_size is not None
    disabled, validated = logging.root.manager.disable, None
    logging.disable(logging.CRITICAL)
    try:
        with silence():
            arguments.validate_args(args, {})
            validated = args
            args.apply_rope_fusion = False  # this machine may lack kernels that the run has
            config_of(args)  # which has checks of its own
    except (AssertionError, ValueError, RuntimeError, NotImplementedError) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        says = " ".join(str(error).split()) or f"{place.line} ({Path(place.filename).name}, line {place.lineno})"
        return Answer(says, validated)
    except Exception:  # of what only a run knows
        return Answer(None, validated)
    finally:
        logging.disable(disabled)
    return Answer(None, validated)


def without_megatron(error: Exception) -> LaunchError:
    """The error for a run whose Megatron cannot be imported."""
    return LaunchError(
        f"Megatron's training loop cannot be imported ({type(error).__name__}: {error}): run `make setup`, pip install "
        "'megatron-core>=0.19.2,<0.20', or set MEGATRON_PATH to a Megatron-LM tree"
    )


def _megatrons_parser(*, trains: bool) -> _Refusing | None:
    """Megatron's parser; None where it cannot be imported and nothing trains here.

    Raises:
        LaunchError: it cannot be imported, and this process is to train.
    """
    try:
        import torch

        from simreg_megatron.cpu import backend as cpu_backend

        if not torch.cuda.is_available():
            cpu_backend.activate()  # so that Megatron can be imported; this process plans, or is on the CPU anyway
        from megatron.training.arguments import add_megatron_arguments
    except Exception as error:
        if not trains:
            return None
        raise without_megatron(error) from None
    parser = _Refusing(allow_abbrev=False)
    add_megatron_arguments(parser)
    return parser


def main(words: Sequence[str]) -> int:
    """Check the plugin's own flags among the words of a launch script, before anything slow is imported."""
    try:
        check_own_flags([flag for flag in group_flags(words) if _is_own(flag)])
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Megatron warns of kernels that a machine for planning does not have."""
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
