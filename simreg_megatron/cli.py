# SPDX-License-Identifier: Apache-2.0
"""The `simreg-megatron` command.

Each command lies in a module of its own, whose `add_command` defines its parser and sets `run`: a function of the
options that returns the exit status (None is 0). Modules import what is heavy inside `run`, so that `--help` is quick.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from simreg_megatron import __version__, doctor
from simreg_megatron.sentences import SentenceError
from simreg_megatron.tools import curves, evaluate, export_hf, import_hf, prepare_data

# What a command needs beyond the package itself, and the extra of setup.py that brings it.
_EXTRAS = {
    "matplotlib": "report", "tensorboard": "report", "lm_eval": "eval", "transformers": "hf", "safetensors": "hf",
    "sentencepiece": "data", "datasets": "data", "pyarrow": "data", "filelock": "data", "megatron": "megatron",
}  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="simreg-megatron",
        description="SimReg for Megatron-LM: check the installation, prepare data, export and evaluate models.",
    )
    parser.add_argument("--version", action="version", version=f"simreg-megatron {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (doctor, prepare_data, export_hf, import_hf, evaluate, curves):
        module.add_command(commands)
    _add_flags(commands)
    return parser


def _add_flags(commands: Any) -> None:
    text = "list the flags that SimReg and AdaGC add to Megatron's, one sentence each"
    parser = commands.add_parser("flags", help=text, description=text)
    parser.add_argument("--markdown", action="store_true", help="as docs/flags.md has them")
    parser.set_defaults(run=_print_flags)


def _print_flags(options: argparse.Namespace) -> None:
    if options.markdown:
        print(flags_page(), end="")
        return
    width = min(100, shutil.get_terminal_size().columns)
    for title, found in _described_flags().items():
        print(f"{title[:1].upper()}{title[1:]}")
        for name, sentence in found:
            print(textwrap.fill(f"{name}  {sentence}", width, initial_indent="  ", subsequent_indent="      "))


def flags_page() -> str:
    """docs/flags.md."""
    lines = [
        "# Flags",
        "",
        "Made by `simreg-megatron flags --markdown` from the parser itself; a test compares the two.",
    ]
    for title, found in _described_flags().items():
        lines += ["", f"## {title[:1].upper()}{title[1:]}", "", "| flag | |", "|---|---|"]
        lines += [f"| `{name}` | {sentence.replace('|', chr(92) + '|')} |" for name, sentence in found]
    return "\n".join([*lines, "", _MORE_FLAGS, ""])


_VALUES = {None: "", int: " N", float: " NUMBER", str: " VALUE"}


def _described_flags() -> dict[str, list[tuple[str, str]]]:
    """By group: each flag with what it takes, and its sentence, as Megatron's parser gets them."""
    from simreg_megatron.plugin.arguments import add_simreg_arguments

    parser = add_simreg_arguments(argparse.ArgumentParser(add_help=False))
    found: dict[str, list[tuple[str, str]]] = {}
    for group in parser._action_groups:
        for action in group._group_actions:
            value = "[=force]" if action.nargs == "?" else _VALUES[action.type]  # type: ignore[index]
            text = action.help or ""
            sentence = f"{text[:1].upper()}{text[1:]}."
            found.setdefault(str(group.description), []).append((action.option_strings[0] + value, sentence))
    return found


_MORE_FLAGS = """Of single objectives, and lambda's schedule: [objectives.md](objectives.md). Scope and layouts:
[exact.md](exact.md). The launch scripts' own options: `bash launch/pretrain_llama.sh --help`. With those of Megatron:
`python -m simreg_megatron pretrain_gpt.py --help`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status: 2 after an error, with one sentence on standard error."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what is half done is removed
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names and tables need letters that a terminal may not have
            stream.reconfigure(errors="replace")
    options = make_parser().parse_args(argv)
    try:
        return int(options.run(options) or 0)
    except SentenceError as error:
        sentence = str(error)
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in _EXTRAS:
            raise
        sentence = f"{name} is not installed: in the clone's folder, pip install '.[{_EXTRAS[name]}]'"
    except BrokenPipeError:  # as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        sentence = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130
    print(f"error: {sentence}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
