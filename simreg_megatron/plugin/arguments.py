# SPDX-License-Identifier: Apache-2.0
"""The `--simreg-*` and `--adagc` flags in Megatron's own parser, checked together as soon as they are parsed."""

from __future__ import annotations

import argparse
import re
from typing import Any, NoReturn

from simreg_megatron.config.flags import (
    OF_ADAGC,
    OF_SIMREG,
    adagc_from_args,
    config_from_args,
    refuse_idle_adagc,
    refuse_idle_settings,
    refuse_unknown,
)
from simreg_megatron.cpu import backend as cpu_backend
from simreg_megatron.notices import one_line

_BARE_PERCENT = re.compile(r"(?<!%)%(?![%(])")  # neither escaped nor the name of a value


def add_simreg_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group "simreg" to Megatron's parser; a bad value ends the program with one sentence and status 2."""
    if OF_SIMREG[0].name in parser._option_string_actions:
        return parser
    group = parser.add_argument_group(title="simreg", description="embedding similarity regularization (SimReg)")
    clipping = parser.add_argument_group(title="adagc", description="adaptive clipping by parameter (AdaGC)")
    clipping.add_argument(
        "--adagc",
        action="store_true",
        default=None,
        help="clip with AdaGC instead of --clip-grad; works without SimReg too (default off)",
    )
    for owner, flags in ((group, OF_SIMREG), (clipping, OF_ADAGC)):
        for flag in flags:
            how: dict[str, Any] = {"type": flag.parse} if flag.parse else {"action": "store_true"}
            owner.add_argument(flag.name, dest=flag.dest, default=None, help=flag.help, **how)
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
    return parser


def _check_after_parsing(parser: argparse.ArgumentParser) -> None:
    """Check the settings together as soon as they are parsed, and describe errors of our flags in one sentence."""
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


def _check_namespace(namespace: argparse.Namespace) -> None:
    given = [flag.name for flag in OF_SIMREG if getattr(namespace, flag.dest) is not None]
    of_adagc = [flag.name for flag in OF_ADAGC if getattr(namespace, flag.dest) is not None]
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
    cpu_backend.refuse(namespace)
    refuse_idle_adagc(namespace)
    adagc_from_args(namespace)  # which refuses what is impossible
    refuse_idle_settings(config_from_args(namespace))
