# SPDX-License-Identifier: Apache-2.0
"""Refuse a run before anything of it starts: flags, their values, ranks that no replicas fill.

The dry run, the run and the submission call the same checks. What Megatron checks itself is asked of Megatron, by its
own parser, validate_args and model config.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import logging
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from launch import checkpoints
from launch.flags import Flag, LaunchError, flag_name, flag_names, flag_value, flatten, group_flags
from launch.options import make_parser
from launch.planned import Machine, Plan

if TYPE_CHECKING:
    from simreg_megatron import SimRegConfig

_INSTALL = "pip install 'megatron-core>=0.19.2,<0.20'"


class _Refusing(argparse.ArgumentParser):
    """Raise an error as one sentence, without the usage of five hundred flags."""

    def error(self, message: str) -> NoReturn:
        raise LaunchError(message)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise LaunchError((message or "").strip().removeprefix("error: "))


def _is_own(flag: Flag) -> bool:
    return flag_name(flag).startswith(("--simreg-", "--adagc"))


def check_own_flags(flags: Sequence[Flag]) -> SimRegConfig:
    """Build SimReg's configuration from the plugin's own flags; a LaunchError names the flag that was meant."""
    from simreg_megatron.config.flags import add_simreg_arguments, config_from_args

    parser = _Refusing(allow_abbrev=False)
    parser.add_argument("--clip-grad", type=float)  # of Megatron's, with which ours are checked
    add_simreg_arguments(parser)
    if (value := flag_value(flags, "--simreg-cpu")) not in (None, "", "force"):
        raise LaunchError(f"--simreg-cpu takes no value, or force, not {value!r}")
    read = [flag for flag in flags if _is_own(flag) or flag_name(flag) == "--clip-grad"]
    words = flatten(flag for flag in read if flag_name(flag) != "--simreg-cpu")
    return config_from_args(parser.parse_known_args(words)[0])


def check_load(flags: Sequence[Flag]) -> None:
    """Check that --load names checkpoints: Megatron would start from scratch and hardly say so."""
    folder = flag_value(flags, "--load")
    if folder is None or folder == flag_value(flags, "--save") or checkpoints.is_loadable(Path(folder)):
        return
    raise LaunchError(
        f"--load {folder}: there is no complete checkpoint: give the folder that --save named, or leave the flag out "
        "to start from scratch"
    )


class Answer(NamedTuple):
    """Megatron's objections, and its arguments if its validate_args has completed them."""

    objection: str | None
    args: argparse.Namespace | None


def check_with_megatron(plan: Plan, machine: Machine, *, trains: bool = False) -> Answer | None:
    """Let Megatron's own parser and checks read the run's flags; a LaunchError if the run would not start.

    None if Megatron cannot be asked. It objects in an Answer only if a run on GPUs is planned without one: some of its
    checks ask the GPU. The script of a source tree may add flags of its own, so unknown ones are accepted for it.
    In a process that `trains`, Megatron's log keeps the output that it finds at import.
    """
    flags = plan.flags
    use_tree(plan.tree)
    with contextlib.nullcontext() if trains else silence():
        parser = _megatrons_parser(trains=trains)
    if parser is None or "--yaml-cfg" in flag_names(flags):
        return Answer(None, None) if parser else None
    args, unknown = parser.parse_known_args(flatten(flag for flag in flags if not _is_own(flag)))
    names = [word.partition("=")[0] for word in unknown if word.startswith("--")]
    if names and plan.tree is None:
        hint = suggestion(names[0], [*parser._option_string_actions, *make_parser(plan.family)._option_string_actions])
        raise LaunchError(f"Megatron has no flag {names[0]}: {hint}")
    if {"--use-checkpoint-args", "--ckpt-convert-format"} & flag_names(flags):  # which bring other settings
        return Answer(None, None)
    answer = _ask(args, machine.world_size)
    from simreg_megatron.cpu import backend as cpu_backend

    if answer.objection and not (machine.gpus and cpu_backend.is_active()):  # which stands in for the GPU
        raise LaunchError(f"Megatron refuses these flags together: {answer.objection}")
    if answer.objection is not None:
        return answer
    try:
        if (config := check_own_flags(flags)).active:
            from simreg_megatron.plugin import refusals

            refusals.refuse_arguments(args, config)
        if plan.tree is None:
            with contextlib.nullcontext() if trains else silence():
                from simreg_megatron import pretrain
            pretrain.check_settings(args)
    except (ValueError, NotImplementedError) as error:
        raise LaunchError(str(error)) from None
    return answer


def suggestion(name: str, known: Sequence[str]) -> str:
    """Name the flag that was probably meant by an unknown one."""
    from simreg_megatron.config.flags import MEANT

    word = name.removeprefix("--")
    ours = {each: f"--simreg-{each}" for each in ("lambda", "temperature", "chunk-size", "objective")}
    own = {**MEANT, **ours, "fp8": "--fp8-format"}
    near = [own[word]] if word in own else difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"did you mean {near[0]}?" if near else "leave it out, or see --help"


def use_tree(tree: Path | None) -> None:
    """Import Megatron from this source tree, if it is one."""
    if tree is not None:
        sys.path.insert(0, str(tree))


def _ask(args: argparse.Namespace, world_size: int) -> Answer:
    """Find the first check at the start of Megatron that these arguments do not pass."""
    from megatron.training import arguments

    args.rank, args.world_size = 0, world_size
    args._is_global_batch_size_explicitly_specified = args.global_batch_size is not None
    disabled, validated = logging.root.manager.disable, None
    logging.disable(logging.CRITICAL)
    try:
        with silence() as said:
            arguments.validate_args(args, {})
            validated = args
            args.apply_rope_fusion = False  # this machine may lack kernels that the run has
            if build := getattr(arguments, "core_transformer_config_from_args", None):  # not in every release
                build(args)
    except SystemExit:  # after a word on a flag of the past
        return Answer(said.getvalue().strip().rpartition("\n")[2], None)
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
    """Make the error for a run whose Megatron cannot be imported."""
    return LaunchError(
        f"Megatron's training loop cannot be imported ({type(error).__name__}: {error}): run `make setup`, {_INSTALL}, "
        "or set MEGATRON_PATH to a Megatron-LM tree"
    )


def _megatrons_parser(*, trains: bool) -> _Refusing | None:
    """Make Megatron's parser; None if it cannot be imported and nothing trains here."""
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


@contextlib.contextmanager
def silence() -> Iterator[io.StringIO]:
    """Keep back Megatron's warnings about kernels that a machine for planning does not have."""
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield quiet


def main(words: Sequence[str]) -> int:
    """Check the launcher's options and the plugin's flags after a launch script, before anything slow is imported."""
    try:
        _, rest = make_parser(Path(words[0]).stem.removeprefix("pretrain_")).parse_known_args(words[1:])
        check_own_flags([flag for flag in group_flags(rest) if _is_own(flag)])
    except (LaunchError, argparse.ArgumentError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
