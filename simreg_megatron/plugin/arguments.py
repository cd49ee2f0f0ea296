# SPDX-License-Identifier: Apache-2.0
"""The `--simreg-*` flags in Megatron's own parser, and back to one `SimRegConfig`."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from simreg_megatron import config as choices
from simreg_megatron import objectives
from simreg_megatron.config import AdaGCConfig, SimRegConfig, as_typed
from simreg_megatron.plugin.cpu import backend as cpu_backend


@dataclass(frozen=True)
class _Flag:
    """One command-line flag: the attribute it leaves in Megatron's args, and the config field it sets."""

    name: str
    field: str
    parse: Callable[[str], Any] | None  # None: a switch
    help: str

    @property
    def dest(self) -> str:
        return self.name.lstrip("-").replace("-", "_")


def _one_of(values: tuple[str, ...]) -> str:
    return "one of " + ", ".join(values)


_FLAGS = (
    _Flag("--simreg-lambda", "lambda_", str, "weight of the term beside the next-token loss: a number, or auto for "
          "10*sqrt(hidden/1024); 0 is plain Megatron (default 0)"),
    _Flag("--simreg-temperature", "temperature", float, "temperature tau, which divides the similarities (default "
          "0.01; other objectives have their own)"),
    _Flag("--simreg-chunk-size", "chunk_size", int, "tokens that are compared with each other; 0 compares whole "
          "sequences (default 1024)"),
    _Flag("--simreg-scope", "scope", str, _one_of(choices.SCOPES) + ": cut chunks on the sequence, the same in every "
          "layout, or on what each rank holds (default exact)"),
    _Flag("--simreg-similarity", "similarity", str, _one_of(choices.SIMILARITIES) + ": how two states are compared "
          "(default cosine)"),
    _Flag("--simreg-objective", "objective", str, _one_of(objectives.names()) + " (measures SimReg in log steps and "
          "does not train on it), or several with their weights: simreg:auto,sigreg:0.05 (default simreg)"),
    _Flag("--simreg-objective-options", "objective_options", str, "options of the objective's own, as name=value with "
          "commas: form=per_pair,self_positive=always"),
    _Flag("--simreg-layers", "layers", str, "whose states get the term: final, or layer numbers from 1 such as "
          "12,24,final (default final)"),
    _Flag("--simreg-placement", "placement", str, _one_of(choices.PLACEMENTS) + ": take the final states behind the "
          "last norm or before it (default post-norm)"),
    _Flag("--simreg-group-reduce", "group_reduce", str, _one_of(choices.GROUP_REDUCTIONS) + ": over the positives and "
          "over the negatives of a token (default sum)"),
    _Flag("--simreg-self-positive", "self_positive", str, _one_of(choices.SELF_POSITIVES) + ": when a token is its own "
          "positive (default always)"),
    _Flag("--simreg-chunk-weight", "chunk_weight", str, _one_of(choices.CHUNK_WEIGHTS) + ": how the chunks of one "
          "sequence are weighed against each other (default token)"),
    _Flag("--simreg-document-mask", "document_mask", None, "tokens of different documents never meet (default off)"),
    _Flag("--simreg-warmup-iters", "warmup_iters", int, "iterations over which lambda rises from 0 (default 0)"),
    _Flag("--simreg-lambda-schedule", "lambda_schedule", str, "how lambda changes over the training: constant, or "
          "linear:F or cosine:F down (or up) to F times lambda (default constant)"),
    _Flag("--simreg-off-after", "off_after", float, "share of the training, between 0 and 1, after which the term is "
          "off and no longer computed (default never)"),
    _Flag("--simreg-every", "every", int, "compute the term in every K-th step alone, with K times the weight: another "
          "objective, the same in expectation (default 1)"),
    _Flag("--simreg-impl", "impl", str, _one_of(choices.IMPLEMENTATIONS) + ": which code computes the loss (default "
          "auto, the fastest that fits)"),
    _Flag("--simreg-log-interval", "log_interval", int, "iterations between SimReg's values in the log, a multiple of "
          "--log-interval, which is the default"),
)  # fmt: skip


_ADAGC_FLAGS = (
    _Flag("--adagc-lambda-rel", "lambda_rel", float, "how far a parameter's gradient norm may rise above its moving "
          "average (default 1.04)"),
    _Flag("--adagc-lambda-abs", "lambda_abs", float, "largest global norm during the warm-up (default: --clip-grad's)"),
    _Flag("--adagc-beta", "beta", float, "of the moving average (default 0.99)"),
    _Flag("--adagc-warmup-iters", "warmup_iters", int, "steps that are clipped by their global norm (default 100)"),
    _Flag("--adagc-variant", "variant", str, _one_of(choices.ADAGC_VARIANTS) + ": what the averages follow (default "
          "clipped)"),
)  # fmt: skip
_PREFIXES = ("--simreg-", "--adagc")
_BARE_PERCENT = re.compile(r"(?<!%)%(?![%(])")  # neither escaped nor the name of a value


def add_simreg_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group "simreg" to Megatron's parser; a bad value ends the program with one sentence and status 2."""
    if _FLAGS[0].name in parser._option_string_actions:
        return parser
    group = parser.add_argument_group(title="simreg", description="embedding similarity regularization (SimReg)")
    _add_flags(group, _FLAGS)
    clipping = parser.add_argument_group(title="adagc", description="adaptive clipping by parameter (AdaGC)")
    clipping.add_argument(
        "--adagc",
        action="store_true",
        default=None,
        help="clip by AdaGC in the place of --clip-grad; needs no SimReg (default off)",
    )
    _add_flags(clipping, _ADAGC_FLAGS)
    group.add_argument(
        "--simreg-cpu",
        dest="simreg_cpu",
        nargs="?",
        const="on",
        default=None,
        help="train on the CPU, for trying and testing; =force where a GPU is (default off)",
    )
    if cpu_backend.is_active():
        cpu_backend.choose_flags(parser)
    _check_after_parsing(parser)
    _let_help_be_printed(parser)
    return parser


def _add_flags(group: argparse._ArgumentGroup, flags: tuple[_Flag, ...]) -> None:
    for flag in flags:
        how: dict[str, Any] = {"type": flag.parse} if flag.parse else {"action": "store_true"}
        group.add_argument(flag.name, dest=flag.dest, default=None, help=flag.help, **how)


def _check_after_parsing(parser: argparse.ArgumentParser) -> None:
    """Check the settings together as soon as they are parsed, in every Megatron alike."""
    parse_known_args = parser.parse_known_args

    def checked(*args: Any, **kwargs: Any) -> tuple[argparse.Namespace, list[str]]:
        namespace, unknown = parse_known_args(*args, **kwargs)
        try:
            _refuse_unknown(parser, unknown)
            _check_namespace(namespace)
        except ValueError as error:
            parser.exit(2, f"error: {error}\n")
        return namespace, unknown

    parser.parse_known_args = checked  # type: ignore[method-assign,assignment]


def _refuse_unknown(parser: argparse.ArgumentParser, words: list[str]) -> None:
    """Also where a script lets Megatron pass over what it does not know."""
    for word in words:
        name = word.partition("=")[0]
        if name.startswith(_PREFIXES):
            known = {_tail(option): option for option in parser._option_string_actions if option.startswith(_PREFIXES)}
            near = difflib.get_close_matches(_tail(name), known, n=1)
            hint = f"did you mean {known[near[0]]}?" if near else "`simreg-megatron flags` lists them"
            raise ValueError(f"there is no flag {name}: {hint}")


def _tail(name: str) -> str:
    """What tells our flags apart."""
    return name.removeprefix("--simreg-").removeprefix("--adagc-")


def _let_help_be_printed(parser: argparse.ArgumentParser) -> None:
    """Megatron 0.19 has a bare percent sign in a help text, on which argparse stumbles when it prints them all."""
    format_help = parser.format_help

    def printable() -> str:
        for action in parser._actions:
            if action.help:
                action.help = _BARE_PERCENT.sub("%%", action.help)
        return format_help()

    parser.format_help = printable  # type: ignore[method-assign]


def _check_namespace(namespace: argparse.Namespace) -> None:
    given = [flag.name for flag in _FLAGS if getattr(namespace, flag.dest) is not None]
    of_adagc = [flag.name for flag in _ADAGC_FLAGS if getattr(namespace, flag.dest) is not None]
    if getattr(namespace, "yaml_cfg", None) is not None and (given or of_adagc or namespace.adagc):
        dropped = [*given, *(["--adagc"] if namespace.adagc else []), *of_adagc]
        raise ValueError(
            f"with --yaml-cfg Megatron drops {', '.join(dropped)} from the command line: "
            "write them into the YAML file as top-level keys instead (simreg_lambda: 10)"
        )
    if namespace.simreg_cpu is not None and not cpu_backend.is_active():
        raise ValueError(
            "--simreg-cpu came too late, Megatron is imported already: start the script with "
            "`python -m simreg_megatron SCRIPT ...` or set SIMREG_CPU=1 and use the launch scripts"
        )
    if cpu_backend.is_active() and getattr(namespace, "distributed_backend", None) == "nccl":
        raise ValueError("--distributed-backend nccl needs a GPU, and this run is on the CPU: leave the flag out")
    of_triton = namespace.simreg_impl in ("gemm", "triton") and not os.environ.get("TRITON_INTERPRET")
    if cpu_backend.is_active() and of_triton:
        raise ValueError(
            f"--simreg-impl {namespace.simreg_impl} needs a GPU, and this run is on the CPU: leave the flag out"
        )
    if adagc_from_args(namespace) is None and of_adagc:
        raise ValueError(f"{', '.join(of_adagc)} has no effect without --adagc: add it, or drop them")
    config = config_from_args(namespace)
    _refuse_layers(config, getattr(namespace, "num_layers", None))
    idle = [name for name in given if name not in ("--simreg-lambda", "--simreg-objective")]
    if idle and not config.active:
        raise ValueError(
            f"{', '.join(idle)} has no effect while --simreg-lambda is 0: "
            "give a lambda, or --simreg-objective none to measure without training on it"
        )


def _refuse_layers(config: SimRegConfig, num_layers: int | None) -> None:
    """Before Megatron builds anything; where it reads its sizes elsewhere, the model itself tells later."""
    beyond = [layer for layer in config.layer_numbers if num_layers is not None and layer > num_layers]
    if beyond:
        raise ValueError(
            f"--simreg-layers {beyond[0]} is beyond the model, which has layers 1 to {num_layers}: name one of them"
        )


def config_from_args(args: Any) -> SimRegConfig:
    """Read the settings from Megatron's namespace; what is absent or None keeps its default."""
    given = {flag.field: getattr(args, flag.dest, None) for flag in _FLAGS}
    return SimRegConfig(**{field: value for field, value in given.items() if value is not None})


def adagc_from_args(args: Any) -> AdaGCConfig | None:
    """The settings of AdaGC, or None where it is off. Its global norm is --clip-grad's, where that clips at all."""
    if not getattr(args, "adagc", None):
        return None
    given = {flag.field: getattr(args, flag.dest, None) for flag in _ADAGC_FLAGS}
    if given["lambda_abs"] is None:
        given["lambda_abs"] = getattr(args, "clip_grad", None) or None
    return AdaGCConfig(**{field: value for field, value in given.items() if value is not None})


def differences_to_checkpoint(checkpoint_args: Any, args: Any) -> list[str]:
    """One line for every setting that differs between this run and the run that wrote the checkpoint."""
    if not hasattr(checkpoint_args, _FLAGS[0].dest):
        return []
    pairs: list[tuple[tuple[_Flag, ...], Any, Any]] = [
        (_FLAGS, config_from_args(checkpoint_args), config_from_args(args))
    ]
    clipped = [adagc_from_args(given) for given in (checkpoint_args, args)]
    found = []
    if (clipped[0] is None) != (clipped[1] is None):
        found.append(
            f"--adagc was {_on_or_off(clipped[0])} when the checkpoint was written and is {_on_or_off(clipped[1])} now"
        )
    elif clipped[0] is not None:
        pairs.append((_ADAGC_FLAGS, clipped[0], clipped[1]))
    return found + [
        f"{flag.name} was {as_typed(getattr(before, flag.field))} when the checkpoint was written and is "
        f"{as_typed(getattr(now, flag.field))} now{_origin(args, flag)}"
        for flags, before, now in pairs
        for flag in flags
        if getattr(before, flag.field) != getattr(now, flag.field)
    ]


def _on_or_off(config: AdaGCConfig | None) -> str:
    return "off" if config is None else "on"


def _origin(args: Any, flag: _Flag) -> str:
    value: Any | None = getattr(args, flag.dest, None)
    return " (its default; give the flag to go on as before)" if value is None else ""
