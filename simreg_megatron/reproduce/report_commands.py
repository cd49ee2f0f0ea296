# SPDX-License-Identifier: Apache-2.0
"""`simreg-megatron report`: what runs say. Heavy imports stay inside, so that `--help` is quick."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from simreg_megatron.sentences import SentenceError
from simreg_megatron.terminal import console, one_sentence

if TYPE_CHECKING:
    from simreg_megatron.report.page import Page
    from simreg_megatron.reproduce.check import Table
    from simreg_megatron.reproduce.pace import Pace
    from simreg_megatron.reproduce.saving import Saving
    from simreg_megatron.reproduce.verdict import Verdict


class _RunsUnlessNamed(TyperGroup):
    """`report RUN...` is `report runs RUN...`: only check, page and runs are commands."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        if args and args[0] not in {*self.commands, "--help"}:
            args = ["runs", *args]
        return super().parse_args(ctx, args)


_HELP = "What runs show: `report RUN...` compares your own, `check` and `page` are for experiments."
app = typer.Typer(no_args_is_help=True, help=_HELP, cls=_RunsUnlessNamed)


@app.callback()
def _root() -> None:
    """What runs show: `report RUN...` compares your own, `check` and `page` are for experiments."""


@app.command()
def runs(
    run: Annotated[
        list[str],
        typer.Argument(
            help="an output folder, a TensorBoard folder or a CSV file (tag, step, value), each PATH or NAME=PATH; "
            "paths of one name are seeds. The others are compared with the first"
        ),
    ],
    output: Annotated[Path, typer.Option(help="the HTML file; Markdown and pictures are written beside it")] = Path(
        "report.html"
    ),
) -> None:
    """Compare runs: curves, ends, tokens and time saved, margins, heat-maps, settings, commands.

    One HTML file that needs no network, and Markdown with its pictures.
    """
    with one_sentence():
        from simreg_megatron.report import own
        from simreg_megatron.report.arms import read_arms

        arms = read_arms(run)
        page = own.page_of(arms)
        _write(page, output)
    for sentence in page.sections[0].verdicts:
        console.print(sentence, markup=False)


def watch(
    run: Annotated[list[str], typer.Argument(help="an output folder or a TensorBoard folder, each PATH or NAME=PATH")],
    every: Annotated[float, typer.Option(help="seconds between two looks", min=0.1, max=86400)] = 10.0,
    once: Annotated[bool, typer.Option("--once", help="look once and stop")] = False,
) -> None:
    """Show runs side by side while they train: losses, cosines, pace, time left. Ctrl-C ends it, not the runs."""
    with one_sentence():
        from simreg_megatron.report.watch import watch as show

        try:
            show(run, every=every, once=once, console=Console())
        except KeyboardInterrupt:
            raise typer.Exit from None


@app.command()
def check(
    results: Annotated[Path, typer.Argument(help="the --output folder of `simreg-megatron reproduce`")],
) -> None:
    """Refuse results that allow no conclusion, and print the verdict on every claim of those that do.

    Exit status 1 where a table breaks the protocol, whatever its claims.
    """
    with one_sentence():
        from simreg_megatron.reproduce.check import read_tables
        from simreg_megatron.reproduce.conclusion import Together

        tables = read_tables(results)
    found = [_print_conclusion(name, tables) for name in tables]
    if told := Together.of(verdict for _, verdicts in found for verdict in verdicts).sentence:
        console.print(told, markup=False)
    if not all(allowed for allowed, _ in found):
        raise typer.Exit(1)


@app.command()
def page(
    results: Annotated[Path, typer.Argument(help="the --output folder of `simreg-megatron reproduce`")],
    output: Annotated[Path, typer.Option(help="the HTML file")] = Path("experiments.html"),
) -> None:
    """Write all experiments as one HTML page that needs no network, and as Markdown.

    Question, verdicts, figures, numbers beside the authors', commands, versions.
    """
    with one_sentence():
        from simreg_megatron.reproduce.check import read_tables
        from simreg_megatron.reproduce.page import page_of

        _write(page_of(read_tables(results)), output)


def conclude(names: Iterable[str], results: Path) -> None:
    """Say what these experiments of a folder show, and write the page of all that it has into it."""
    from simreg_megatron.reproduce.check import read_tables
    from simreg_megatron.reproduce.page import page_of

    try:
        tables = read_tables(results)
        for name in names:
            _print_conclusion(name, tables)
        _write(page_of(tables), results / "experiments.html")
    except SentenceError as error:
        console.print(f"The runs have ended, and this is missing in their report: {error}", markup=False)


def _write(page: Page, output: Path) -> None:
    from simreg_megatron.report.page import write

    html, markdown, *_ = write(page, output)
    console.print(f"Written: {html}, {markdown}", markup=False)


def _print_conclusion(name: str, tables: dict[str, Table]) -> tuple[bool, list[Verdict]]:
    """Whether the protocol allows one, and the verdicts."""
    from simreg_megatron.reproduce.check import refused_headlines, violations

    found, headlines = violations(name, tables), refused_headlines(tables[name].plan)
    console.print(f"[bold]{name}[/bold]: {escape(tables[name].plan.question)}")
    for sentence in [*found, *headlines]:
        console.print(f"  refused: {sentence}", style="bold red", markup=False)
    return not (found or headlines), [] if found else _print_verdicts(name, tables)


def _print_verdicts(name: str, tables: dict[str, Table]) -> list[Verdict]:
    from simreg_megatron.reproduce.check import measured_steps
    from simreg_megatron.reproduce.conclusion import notes, verdicts_on
    from simreg_megatron.reproduce.pace import pace

    for note in notes(name, tables):
        console.print(f"  note: {note}", markup=False)
    verdicts = verdicts_on(name, tables)
    for verdict in verdicts:
        claim = verdict.claim
        console.print(f"  {verdict.sentence}", markup=False)
        if not any(verdict.diverged):
            console.print(f"    {_noise(verdict)}", markup=False)
        if verdict.worth is not None:
            found = pace(tables[name].rows, claim.arm, claim.than, verdict.place, measured_steps(tables))
            console.print(f"    {_saved(verdict, verdict.worth, found)}", markup=False)
    return verdicts


def _noise(verdict: Verdict) -> str:
    unit = f" {verdict.unit}" if verdict.unit else ""
    return (
        f"{verdict.claim.than} varies from seed to seed with a standard deviation of {verdict.noise:.4f}{unit}; these "
        f"seeds would detect a difference of {verdict.detectable:.4f} four times in five"
    )


def _saved(verdict: Verdict, worth: Saving, measured: Pace | None) -> str:
    from simreg_megatron.reproduce.pace import EXPERIMENT

    low, high = worth.exchange_interval
    unit = f" {verdict.unit}" if verdict.unit else ""
    told = (
        f"100 more steps are worth {worth.exchange:.4f}{unit} ({low:.4f} to {high:.4f}, from {worth.shorter}), so what "
        f"is saved is {worth.told}"
    )
    if measured is None:
        return f"{told}; how much of the time, the experiment {EXPERIMENT} in the same folder tells"
    return f"{told}, {measured.saved(worth.tokens):.0%} of the time ({measured.told})"
