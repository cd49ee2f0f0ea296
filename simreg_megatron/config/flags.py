# SPDX-License-Identifier: Apache-2.0
"""The `--simreg-*` and `--adagc` flags in Megatron's parser: each sets one field of a record, checked when parsed."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from simreg_megatron import objectives
from simreg_megatron.config.adagc import ADAGC_VARIANTS, AdaGCConfig
from simreg_megatron.config.simreg import CHOICES, SimRegConfig
from simreg_megatron.config.values import as_typed, describe
from simreg_megatron.cpu import backend as cpu_backend
from simreg_megatron.notices import one_line, refuse

_FAMILIES = ("--simreg-", "--adagc")
MEANT = {
    "weight": "--simreg-lambda", "tau": "--simreg-temperature", "chunk": "--simreg-chunk-size",
    "loss": "--simreg-objective",
}  # fmt: skip
"""Names under which other programs have these flags, without dashes."""
_BARE_PERCENT = re.compile(r"(?<!%)%(?![%(])")  # neither escaped nor the name of a value


@dataclass(frozen=True)
class Flag:
    """One command-line flag: the attribute it leaves in Megatron's args, and the config field it sets."""

    name: str
    field: str
    parse: Callable[[str], Any] | None  # None: a switch
    help: str

    @property
    def dest(self) -> str:
        return self.name.lstrip("-").replace("-", "_")


def _flags(family: str, record: type, choices: dict[str, tuple[str, ...]], helps: dict[str, str]) -> tuple[Flag, ...]:
    """Make a flag for each of these fields of a record; `choices` are named before the help."""
    kinds = {"int": int, "float": float, "bool": None}
    parse = {field.name: kinds.get(str(field.type).partition(" | None")[0], str) for field in fields(record)}
    names = {field: family + field.rstrip("_").replace("_", "-") for field in helps}
    before = {field: f"one of {', '.join(known)}: " for field, known in choices.items()}
    return tuple(Flag(names[field], field, parse[field], before.get(field, "") + text) for field, text in helps.items())


SIMREG_FLAGS = _flags("--simreg-", SimRegConfig, CHOICES, {
    "lambda_": "weight of the term relative to the next-token loss: a number, or auto for 10*sqrt(hidden/1024); 0 is "
    "plain Megatron (default 0)",
    "temperature": "temperature tau, which divides the similarities (default 0.01; other objectives have their own)",
    "chunk_size": "tokens per chunk; only tokens of one chunk are compared; 0 compares whole sequences (default 1024)",
    "scope": "cut chunks on the sequence, the same in every layout, or on what each rank holds (default exact)",
    "similarity": "how two states are compared (default cosine)",
    "objective": f"one of {', '.join(objectives.names())} (measures SimReg in log steps and does not train on it), or "
    "several with their weights: simreg:auto,sigreg:0.05 (default simreg)",
    "objective_options": "the objective's own options, as name=value separated by commas: form=supcon_out,"
    "self_positive=never",
    "layers": "layers whose outputs get the term: final, or numbers from 1 such as 12,24,final (default final)",
    "placement": "take the final states after the last norm or before it (default post-norm)",
    "group_reduce": "over the positives, and over the negatives, of a token (default sum)",
    "self_positive": "when a token is its own positive (default always)",
    "chunk_weight": "how the chunks of one sequence are weighed against each other (default token)",
    "document_mask": "tokens of different documents never meet (default: in packed rows of fine-tuning alone)",
    "start_iter": "iterations before the term begins; warm-up and schedule count from there: in a job that is under "
    "way, the iteration that it goes on from (default 0)",
    "warmup_iters": "N iterations over which lambda rises, from lambda/N in the first one (default 0)",
    "lambda_schedule": "how lambda changes over the training: constant, or linear:F or cosine:F down (or up) to F "
    "times lambda (default constant)",
    "off_after": "share of the training, between 0 and 1, after which the term is off and no longer computed (default "
    "never)",
    "every": "compute the term only in every N-th step, with N times the weight: not the same objective, but equal in "
    "expectation where no gradient is clipped (default 1)",
    "impl": "which code computes the loss (default auto: on a GPU triton where it is right, else tiled)",
    "log_interval": "iterations between SimReg's values in the log, a multiple of --log-interval, which is the default",
})  # fmt: skip
ADAGC_FLAGS = _flags("--adagc-", AdaGCConfig, {"variant": ADAGC_VARIANTS}, {
    "lambda_rel": "how far a parameter's gradient norm may rise above its moving average (default 1.04)",
    "lambda_abs": "largest global norm during the warm-up (default: --clip-grad's, or 1 if that is 0)",
    "beta": "decay of the moving averages (default 0.99)",
    "warmup_iters": "steps that are clipped by their global norm (default 100)",
    "variant": "what the averages follow (default clipped)",
})  # fmt: skip


def add_simreg_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to Megatron's parser; a bad value ends the program with one sentence and status 2."""
    if SIMREG_FLAGS[0].name in parser._option_string_actions:
        return parser
    group = parser.add_argument_group(title="simreg", description="embedding similarity regularization (SimReg)")
    clipping = parser.add_argument_group(title="adagc", description="adaptive clipping by parameter (AdaGC)")
    text = "clip with AdaGC instead of --clip-grad; works without SimReg too (default off)"
    clipping.add_argument("--adagc", action="store_true", default=None, help=text)
    for owner, flags in ((group, SIMREG_FLAGS), (clipping, ADAGC_FLAGS)):
        for flag in flags:
            how: dict[str, Any] = {"type": flag.parse} if flag.parse else {"action": "store_true"}
            owner.add_argument(flag.name, dest=flag.dest, default=None, help=flag.help, **how)
    text = "train on the CPU, for trying and testing; =force where a GPU is (default off)"
    group.add_argument("--simreg-cpu", nargs="?", const="on", default=None, help=text)
    if cpu_backend.is_active():
        cpu_backend.choose_flags(parser)
    parse_known_args, argparse_error, format_help = parser.parse_known_args, parser.error, parser.format_help

    def error_of_a_flag(message: str) -> NoReturn:
        if not message.startswith(("argument --simreg-", "argument --adagc")):
            argparse_error(message)
        parser.exit(2, f"error: {one_line(message)}\n")  # without Megatron's usage, of some hundred lines

    def checked(*args: Any, **kwargs: Any) -> tuple[argparse.Namespace, list[str]]:
        namespace, unknown = parse_known_args(*args, **kwargs)
        try:
            refuse_unknown(unknown, parser._option_string_actions)
            _check_namespace(namespace)
        except ValueError as error:
            parser.exit(2, f"error: {one_line(error)}\n")
        return namespace, unknown

    def printable_help() -> str:  # Megatron 0.19 has a bare percent sign in a help text, which argparse cannot print
        for action in parser._actions:
            if action.help:
                action.help = _BARE_PERCENT.sub("%%", action.help)
        return format_help()

    parser.parse_known_args = checked  # type: ignore[method-assign,assignment]
    parser.error = error_of_a_flag  # type: ignore[method-assign]
    parser.format_help = printable_help  # type: ignore[method-assign]
    return parser


def _check_namespace(args: argparse.Namespace) -> None:
    given = [*_given(SIMREG_FLAGS, args), *(["--adagc"] if args.adagc else []), *_given(ADAGC_FLAGS, args)]
    refuse(
        (given and getattr(args, "yaml_cfg", None) is not None,
         f"with --yaml-cfg Megatron drops {', '.join(given)} from the command line: write them into the YAML file as "
         "top-level keys instead (simreg_lambda: 10)"),
        (args.simreg_cpu is not None and not cpu_backend.is_active(),
         "--simreg-cpu came too late, Megatron is imported already: start the script with "
         "`python -m simreg_megatron SCRIPT ...` or set SIMREG_CPU=1 and use the launch scripts"),
    )  # fmt: skip
    cpu_backend.refuse(args)
    adagc_from_args(args)
    config_from_args(args)


def _given(flags: tuple[Flag, ...], args: Any) -> list[str]:
    return [flag.name for flag in flags if getattr(args, flag.dest, None) is not None]


def config_from_args(args: Any) -> SimRegConfig:
    """Read the settings from Megatron's namespace; ValueError if they are impossible, or have no effect."""
    given = {flag.field: getattr(args, flag.dest, None) for flag in SIMREG_FLAGS}
    config = SimRegConfig(**{field: value for field, value in given.items() if value is not None})
    refuse_idle_settings(config)
    return config


def refuse_idle_settings(config: SimRegConfig) -> None:
    """Raise ValueError for settings with a lambda of 0, which would be silently ignored."""
    plain = SimRegConfig()
    for name in ("objective", *(flag.field for flag in SIMREG_FLAGS)):
        if (value := getattr(config, name)) != getattr(plain, name) and not config.active:
            raise ValueError(
                f"{describe(name, value)} has no effect while lambda is 0: give a lambda, or objective none to "
                "measure without training on it"
            )


def adagc_from_args(args: Any) -> AdaGCConfig | None:
    """Return the same for AdaGC, or None if it is off. Its global norm is --clip-grad's, if that clips at all."""
    names, is_on = _given(ADAGC_FLAGS, args), getattr(args, "adagc", None)
    given = {flag.field: getattr(args, flag.dest, None) for flag in ADAGC_FLAGS}
    refuse(
        (names and not is_on, f"{', '.join(names)} has no effect without --adagc: add it, or drop them"),
        (given["warmup_iters"] == 0 and (given["lambda_abs"] is not None or given["variant"] == "raw"),
         "--adagc-lambda-abs and --adagc-variant raw have no effect with --adagc-warmup-iters 0: drop them"),
    )  # fmt: skip
    if given["lambda_abs"] is None:
        given["lambda_abs"] = getattr(args, "clip_grad", None) or None
    return AdaGCConfig(**{field: value for field, value in given.items() if value is not None}) if is_on else None


def differences(flags: tuple[Flag, ...], read: Callable[[Any], Any], checkpoint_args: Any, args: Any) -> list[str]:
    """Return a line for every setting that differs from the checkpoint's; `read` makes the record of a namespace."""
    if not hasattr(checkpoint_args, SIMREG_FLAGS[0].dest):
        return []
    before, now = read(checkpoint_args), read(args)
    if before is None or now is None:
        was, is_now = ("off" if record is None else "on" for record in (before, now))
        return [] if was == is_now else [f"--adagc was {was} when the checkpoint was written and is {is_now} now"]
    by_default = " (its default; set the flag to continue as before)"
    return [
        f"{flag.name} was {as_typed(getattr(before, flag.field))} when the checkpoint was written and is "
        f"{as_typed(getattr(now, flag.field))} now{by_default if getattr(args, flag.dest, None) is None else ''}"
        for flag in flags
        if getattr(before, flag.field) != getattr(now, flag.field)
    ]


def refuse_unknown(words: Iterable[str], known: Iterable[str]) -> None:
    """Raise ValueError for words that are misspelled flags of ours, also if a script lets Megatron ignore these."""
    for name in (word.partition("=")[0] for word in words):
        for family in filter(name.startswith, _FAMILIES):
            tail = name.removeprefix(family)
            tails = [option.removeprefix(family) for option in known if option.startswith(family)]
            near = [family + match for match in difflib.get_close_matches(tail, tails, n=1)]
            hint = "`simreg-megatron flags` lists them"
            if meant := MEANT.get(tail) or "".join(near):
                hint = f"did you mean {meant}?"
            raise ValueError(f"there is no flag {name}: {hint}")
