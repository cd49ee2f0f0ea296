# SPDX-License-Identifier: Apache-2.0
"""`simreg-megatron reproduce`. Heavy imports stay inside, so that `--help` is quick."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from simreg_megatron.reproduce.errors import ReproduceError
from simreg_megatron.terminal import console, one_sentence, print_error

if TYPE_CHECKING:
    from simreg_megatron.reproduce.cluster import Standing
    from simreg_megatron.reproduce.dataset import Dataset
    from simreg_megatron.reproduce.plan import Plan
    from simreg_megatron.reproduce.runs import Entry
    from simreg_megatron.reproduce.store import Store

_MOST_AT_ONCE = 4096


def register(app: typer.Typer) -> None:
    """Add the command of this package to the program."""
    app.command("reproduce")(reproduce)


def reproduce(
    plans: Annotated[list[str], typer.Argument(help="names of experiments that ship with the package, or .yaml files")],
    output: Annotated[
        Path, typer.Option(help="folder of runs and results; the same one continues what was started")
    ] = (Path("runs/reproduce")),
    jobs: Annotated[
        int, typer.Option(min=1, max=_MOST_AT_ONCE, help="runs at a time (default: one for each processor)")
    ] = (os.cpu_count() or 1),
    threads: Annotated[int, typer.Option(min=1, max=_MOST_AT_ONCE, help="threads of each run")] = 1,
    model: Annotated[
        str | None, typer.Option(help="a preset such as tiny or 350m instead of the plan's sizes", show_default=False)
    ] = None,
    sizes: Annotated[str | None, typer.Option(help="only these widths, such as 64,96", show_default=False)] = None,
    seeds: Annotated[int, typer.Option(min=0, help="number of seeds, instead of the plan's", show_default=False)] = 0,
    data: Annotated[
        str | None, typer.Option(help="builtin, large or a folder, instead of the plan's", show_default=False)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="a few steps of each arm, as a test of the plan")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the runs and their commands, and stop")] = False,
    low_priority: Annotated[
        bool, typer.Option("--low-priority", help="run only when nobody else wants the processor")
    ] = False,
    slurm: Annotated[
        Path | None,
        typer.Option(
            help="settings of a cluster (launch/slurm/cluster.env): submit each run as a chain of jobs, collect what "
            "has ended, and return",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run an experiment as its plan says: question, arms, trials and seeds are fixed before the first run.

    After a stop or a kill the same command continues; finished runs are never repeated.
    """
    from simreg_megatron.reproduce.local import give_way, launcher_of
    from simreg_megatron.reproduce.plan_file import read_plan
    from simreg_megatron.reproduce.report_commands import conclude
    from simreg_megatron.reproduce.stopping import terminated_like_ctrl_c
    from simreg_megatron.reproduce.store import Store

    mend = "make room or mend the rights there, or give another --output"
    stopped = f"Stopped, and so are all runs; the same command continues from {output}."
    with one_sentence(mend=mend, stopped=stopped), terminated_like_ctrl_c():
        if slurm and low_priority:
            raise ReproduceError("--low-priority is about this machine, and --slurm runs elsewhere: leave one out")
        if slurm and dry_run:
            raise ReproduceError("--dry-run prints what would run on this machine: leave out --slurm, or --dry-run")
        for name, given in (("model", model), ("sizes", sizes), ("data", data)):
            if given == "":
                raise ReproduceError(f"--{name} is empty: give it a value, or leave it out")
        launcher_of("llama")  # before a corpus is built, or a preset looked for, where there is no clone
        chosen = [_chosen(read_plan(name), model or "", sizes or "", seeds, data or "") for name in plans]
        store = Store((output / "quick" if quick else output).absolute())  # runs start in another folder
        if low_priority:
            give_way()
        failed = waiting = 0
        for plan in chosen:
            if slurm:
                standing = _submit_plan(plan, store, slurm, quick=quick)
                failed += len(standing.failed)
                waiting += len(standing.queued) + len(standing.submitted)
            else:
                failed += _run_plan(plan, store, jobs=jobs, threads=threads, quick=quick, dry_run=dry_run)
        if not (failed or waiting or dry_run or quick):
            conclude(dict.fromkeys(plan.name for plan in chosen), output)
    if failed:
        raise typer.Exit(1)


def _chosen(plan: Plan, model: str, sizes: str, seeds: int, data: str) -> Plan:
    """The plan with what the command line replaces."""
    from simreg_megatron.reproduce.plan_checks import refuse_too_many
    from simreg_megatron.reproduce.presets import preset

    if model and sizes:
        raise ReproduceError("--model and --sizes both choose the models: give one")
    if sizes:
        wanted = [size.strip() for size in sizes.split(",") if size.strip()]
        unknown = [size for size in wanted if size not in map(str, plan.sizes)]
        if unknown:
            raise ReproduceError(
                f"{plan.name} has no size {unknown[0]}: its sizes are {', '.join(map(str, plan.sizes))}"
            )
        plan = replace(plan, sizes=tuple(size for size in plan.sizes if str(size) in wanted))
    if model:
        preset(plan.family, model)
        if not seeds and not isinstance(plan.seeds, int) and model not in plan.seeds:
            raise ReproduceError(f"{plan.name} states no number of seeds for {model}: give --seeds N")
        plan = replace(plan, sizes=(model,), data="builtin" if model == "tiny" else plan.data)
    plan = replace(plan, seeds=seeds or plan.seeds, data=data or plan.data)
    refuse_too_many(plan, plan.name)
    return plan


def _run_plan(plan: Plan, store: Store, *, jobs: int, threads: int, quick: bool, dry_run: bool) -> int:
    """How many of its runs failed. A dry run writes nothing but what `open_dataset` keeps beside the text."""
    from simreg_megatron.reproduce import speed
    from simreg_megatron.reproduce.dataset import open_dataset
    from simreg_megatron.reproduce.local import run_here
    from simreg_megatron.reproduce.runs import distinct, tokens_of
    from simreg_megatron.reproduce.screen import shown

    dataset = open_dataset(plan.data)
    entries = _entries(plan, dataset, store, quick, dry_run=dry_run)
    runs = distinct(entries)
    _introduce(plan, quick=quick)
    if not dry_run:
        store.refuse_to_lose(plan.name, entries)
    left = [run for run in runs if store.result(run) is None]
    if not dry_run:
        speed.measure(left, store, dataset, jobs=jobs, threads=threads, say=console.print)
    costs = speed.costs(left, dataset, speed.known(left, store, jobs=jobs, threads=threads))
    hours = speed.until_all_end(costs.values(), jobs) / 3600
    duration = f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.0f} minutes"
    told = f"about {duration} here with {jobs} at a time"
    console.print(
        f"{len(runs)} runs of {sum(map(tokens_of, runs)) / 1e6:.1f} million tokens in all; {len(left)} are left, "
        f"{told if len(costs) == len(left) else 'and how long they take here is measured before the first one'}"
    )
    if dry_run:
        _print_commands(entries, store, dataset)
        return 0
    with shown(console, plan, runs, entries, store, costs, jobs) as progress:
        run_here(runs, store, dataset, jobs=jobs, threads=threads, progress=progress)
    store.write_tables(plan, entries)
    return _report_failures(runs, store)


def _submit_plan(plan: Plan, store: Store, site: Path, *, quick: bool) -> Standing:
    """Where its runs are; `failed` are those that did since the last call."""
    from simreg_megatron.reproduce.cluster import run_on_cluster
    from simreg_megatron.reproduce.dataset import open_dataset
    from simreg_megatron.reproduce.runs import distinct, tokens_of

    dataset = open_dataset(plan.data)
    entries = _entries(plan, dataset, store, quick)
    runs = distinct(entries)
    _introduce(plan, quick=quick)
    console.print(f"{len(runs)} runs of {sum(map(tokens_of, runs)) / 1e6:.1f} million tokens in all")
    standing = run_on_cluster(runs, store, dataset, site=site.absolute())
    store.write_tables(plan, entries)
    console.print(standing.sentence)
    _report_failures(standing.failed, store)
    return standing


def _introduce(plan: Plan, *, quick: bool) -> None:
    from simreg_megatron.reproduce.check import FEWEST_SEEDS

    console.print(f"[bold]{plan.name}[/bold]: {escape(plan.question)}")
    for claim in plan.claims:
        than = claim.than if claim.times == 1 else f"{claim.times:g} times {claim.than}"
        console.print(f"  claim: {claim.says} ({claim.metric} of {claim.arm} against {than})", markup=False)
    few = [size for size in plan.sizes if plan.claims and plan.seeds_at(size) < FEWEST_SEEDS and not quick]
    if few:
        console.print(
            f"Note: with fewer than {FEWEST_SEEDS} seeds there will be no verdict, and size {few[0]} has "
            f"{plan.seeds_at(few[0])}",
            markup=False,
        )


def _entries(plan: Plan, dataset: Dataset, store: Store, quick: bool, *, dry_run: bool = False) -> list[Entry]:
    from simreg_megatron.reproduce.check import settings_of, sizes_of
    from simreg_megatron.reproduce.plan_file import read_plan
    from simreg_megatron.reproduce.runs import entries_of
    from simreg_megatron.reproduce.shipped import put_beside, shipped_search
    from simreg_megatron.reproduce.tuned import (
        ended_trials,
        first_trial_of,
        refuse_unfit,
        searched_sizes,
        tuned_in,
        untuned,
    )  # fmt: skip

    if not plan.tuned_in:
        return entries_of(plan, dataset, untuned, quick=quick)
    search = read_plan(plan.tuned_in)
    refuse_unfit(plan, search)
    if quick:
        return entries_of(plan, dataset, first_trial_of(search), quick=True)
    searched = entries_of(search, dataset, untuned)
    shipped = shipped_search(search.name)
    if shipped is not None and not any(store.result(entry.run) for entry in searched):
        if not dry_run:
            put_beside(search.name, store.folder)
        console.print(
            f"Settings: the best of {search.name} as it ships with the package; to search with your own text, "
            f"`simreg-megatron reproduce {search.name}` first, with another --output",
            markup=False,
        )
        _warn_of_borrowed(plan, sizes_of(shipped))
        return entries_of(plan, dataset, settings_of(plan, {search.name: shipped}))
    entries = entries_of(plan, dataset, tuned_in(search, searched, store))
    _warn_of_borrowed(plan, searched_sizes(search, ended_trials(searched, store)))
    return entries


def _warn_of_borrowed(plan: Plan, searched: Sequence[int | str]) -> None:
    from simreg_megatron.reproduce.tuned import borrowed

    if told := borrowed(plan.sizes, searched):
        console.print(
            f"Note: {told}. The arms are not tuned there, so a difference may be the settings'; to tune them, add the "
            f"size to a copy of the search {plan.tuned_in} and run that first",
            markup=False,
        )


def _print_commands(entries: Sequence[Entry], store: Store, dataset: Dataset) -> None:
    import shlex

    from simreg_megatron.reproduce.local import command_of

    for entry in entries:
        done = "ended" if store.result(entry.run) else "to run"
        trial = f", trial {entry.trial}" if entry.trial else ""
        console.print(f"# {entry.arm}, size {entry.size}, seed {entry.seed}{trial}: {done}", markup=False)
        console.print(shlex.join(command_of(entry.run, store.run_folder(entry.run), dataset)), markup=False)


def _report_failures(runs: Sequence, store: Store) -> int:
    failures = [(run, found) for run in runs if (found := store.failure(run)) is not None]
    for run, found in failures:
        log = store.run_folder(run) / "log.txt"
        how = f"ended with exit status {found['exit']}" if found["exit"] else f"has no result ({found['tail']})"
        where = f"its log is {log}" if log.is_file() else "it left no log"
        print_error(f"{run.name} {how}: {where}")
    return len(failures)
