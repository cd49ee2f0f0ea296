# SPDX-License-Identifier: Apache-2.0
"""The `simreg-megatron` command."""

from __future__ import annotations

import argparse
import io
import signal
import sys
import textwrap
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from simreg_megatron import __version__
from simreg_megatron.checkpoint import commands as checkpoint_commands
from simreg_megatron.data.commands import app as data_commands
from simreg_megatron.doctor import doctor
from simreg_megatron.evaluation import commands as evaluation_commands
from simreg_megatron.reproduce import commands as reproduce_commands
from simreg_megatron.reproduce.report_commands import app as report_commands
from simreg_megatron.reproduce.report_commands import watch


class _Commands(TyperGroup):
    """`simreg-megatron prepare` meant `simreg-megatron data prepare`."""

    def resolve_command(self, context: Any, args: list[str]) -> Any:
        for name, group in self.commands.items():
            if args[0] not in self.commands and args[0] in getattr(group, "commands", {}):
                context.fail(f"there is no command {args[0]}: did you mean `simreg-megatron {name} {args[0]}`?")
        return super().resolve_command(context, args)


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    help="SimReg for Megatron-LM: check the installation, prepare data, export and evaluate models, run experiments.",
)
app.command("doctor")(doctor)
app.add_typer(data_commands, name="data")
checkpoint_commands.register(app)
evaluation_commands.register(app)
reproduce_commands.register(app)
app.add_typer(report_commands, name="report")
app.command("watch")(watch)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"simreg-megatron {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="print the version and stop")
    ] = False,
) -> None:
    """SimReg for Megatron-LM: check the installation, prepare data, export and evaluate models, run experiments."""


@app.command()
def flags(
    markdown: Annotated[bool, typer.Option("--markdown", help="as docs/flags.md has them")] = False,
) -> None:
    """List the flags that SimReg and AdaGC add to Megatron's, one sentence each."""
    if markdown:
        print(flags_page(), end="")
        return
    width = min(100, Console().width)
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


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # in order: nothing half made stays
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names and tables need letters that a terminal may not have
            stream.reconfigure(errors="replace")
    app()


if __name__ == "__main__":
    main()
