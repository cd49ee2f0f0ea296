# SPDX-License-Identifier: Apache-2.0
"""`simreg-megatron report`: what finished experiments say. Heavy imports stay inside, so that `--help` is quick."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from simreg_megatron.reproduce.errors import ReproduceError

if TYPE_CHECKING:
    from simreg_megatron.reproduce.check import Table
    from simreg_megatron.reproduce.verdict import Verdict

app = typer.Typer(no_args_is_help=True, help="What finished experiments say, and whether it may be concluded.")
_console = Console(soft_wrap=True, highlight=False)


@app.callback()
def _root() -> None:
    """What finished experiments say, and whether it may be concluded."""


@app.command()
def check(
    results: Annotated[Path, typer.Argument(help="the --output folder of `simreg-megatron reproduce`")],
) -> None:
    """Refuse results that allow no conclusion, and print the verdict on every claim of those that do.

    Exit status 1 where a table breaks the protocol, whatever its claims.
    """
    from simreg_megatron.data.indexed import DataError
    from simreg_megatron.reproduce.check import read_tables, violations

    try:
        tables = read_tables(results)
    except (ReproduceError, DataError) as error:
        _console.print(f"error: {error}", style="bold red", markup=False)
        raise typer.Exit(2) from None
    broken = False
    for name, table in tables.items():
        found = violations(name, tables)
        broken = broken or bool(found)
        _console.print(f"[bold]{name}[/bold]: {table.plan.question}")
        for sentence in found:
            _console.print(f"  refused: {sentence}", style="bold red", markup=False)
        if not found:
            _print_verdicts(table)
    if broken:
        raise typer.Exit(1)


@app.command()
def page(
    results: Annotated[Path, typer.Argument(help="the --output folder of `simreg-megatron reproduce`")],
    output: Annotated[Path, typer.Option(help="the HTML file")] = Path("experiments.html"),
) -> None:
    """Write one HTML page of all experiments: question, verdicts, figures, numbers, commands. It needs no network."""
    from simreg_megatron.data.indexed import DataError
    from simreg_megatron.reproduce.check import read_tables
    from simreg_megatron.reproduce.page import html_page

    try:
        output.write_text(html_page(read_tables(results)), encoding="utf-8")
    except (ReproduceError, DataError) as error:
        _console.print(f"error: {error}", style="bold red", markup=False)
        raise typer.Exit(2) from None
    except OSError as error:
        _console.print(f"error: {output} cannot be written ({error.strerror}): give another --output", markup=False)
        raise typer.Exit(2) from None
    _console.print(f"Written: {output}", markup=False)


def _print_verdicts(table: Table) -> None:
    from simreg_megatron.reproduce.verdict import judge

    if len({row["commit"] for row in table.rows}) > 1:
        _console.print("  note: its runs were made by several versions of the code (column commit)")
    for verdict in judge(table.plan, table.rows):
        _console.print(f"  {verdict.sentence}", markup=False)
        _console.print(f"    noise of {verdict.claim.than}: {verdict.noise:.4f}{_worth(verdict)}", markup=False)


def _worth(verdict: Verdict) -> str:
    if verdict.exchange is None:
        return ""
    told = f"; 100 more steps are worth {verdict.exchange:.4f} to it"
    return told if verdict.saving is None else f"{told}, so the arm saves {verdict.saving:.0%} of the tokens"
