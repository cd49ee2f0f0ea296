# SPDX-License-Identifier: Apache-2.0
"""The `simreg-megatron` command.

Each command lies in a module of its own, whose `add_command` defines its parser and sets `run`: a function of the
options that returns the exit status (None is 0). Modules import what is heavy inside `run`, so that `--help` is quick.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence

from simreg_megatron.cli import doctor
from simreg_megatron.config import __version__
from simreg_megatron.notices import SentenceError
from simreg_megatron.tools import curves, evaluate, export_hf, import_hf, prepare_data

# What a command needs beyond the package itself, and the extra of setup.py that brings it.
_EXTRAS = {
    "matplotlib": "report", "tensorboard": "report", "lm_eval": "eval", "transformers": "hf", "safetensors": "hf",
    "sentencepiece": "data", "datasets": "data", "pyarrow": "data", "zstandard": "data", "filelock": "data",
    "megatron": "megatron",
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
    text = "list the flags that SimReg and AdaGC add to Megatron's, one sentence each"
    commands.add_parser("flags", help=text, description=text).set_defaults(run=_print_flags)
    return parser


def _print_flags(options: argparse.Namespace) -> None:
    from simreg_megatron.config.flags import add_simreg_arguments

    print(add_simreg_arguments(argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS)).format_help())


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status: 2 after an error, with one sentence on standard error."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what is half done is removed
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))  # workers may swallow it
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
