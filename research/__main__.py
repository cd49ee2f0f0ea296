# SPDX-License-Identifier: Apache-2.0
"""`python -m research`: run the experiments of research/plans, and say what their results show."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import signal
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

from research import analyse, pages
from research.plan import Entry, Plan, ResearchError, Run, entries_of, plan_names, read_plan
from research.run import Runner, Store, command_of, open_dataset
from research.tables import KEPT, Table, read_table, read_tables, settings_of, write_table
from simreg_megatron.notices import SentenceError
from simreg_megatron.tools.prepare_data import count

_KEPT_CURVES = ("train_loss", "validation_loss", "simreg_loss", "positive_cosine", "negative_cosine")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m research", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="train the runs of plans; the same command continues what was stopped")
    run.add_argument("plans", nargs="+", metavar="PLAN", help=f"a .yaml file, or one of {', '.join(plan_names())}")
    run.add_argument("--output", type=Path, default=Path("runs/research"), help="(default: %(default)s)")
    run.add_argument(
        "--jobs", type=count, default=os.cpu_count() or 1, help="runs at a time (default: one a processor)"
    )
    run.add_argument("--threads", type=int, default=1, help="threads of each run (default: %(default)s)")
    run.add_argument("--model", help="a preset of launch/models such as 350m, instead of the plan's sizes")
    run.add_argument("--sizes", type=lambda text: text.split(","), help="only these sizes of the plan, such as 64,96")
    run.add_argument("--seeds", type=count, help="number of seeds, instead of the plan's")
    run.add_argument("--data", help="builtin, large or a folder, instead of the plan's")
    run.add_argument("--quick", action="store_true", help="six steps of each arm, to see that the plan runs")
    run.add_argument("--dry-run", action="store_true", help="print the commands and stop")
    run.add_argument("--low-priority", action="store_true", help="run only when the processor is otherwise idle")
    run.set_defaults(work=_run)
    report = commands.add_parser("report", help="print the verdict on every claim")
    report.add_argument("folder", type=Path, help="the --output folder of `run`")
    report.set_defaults(work=_report)
    keep = commands.add_parser(
        "keep", help="copy complete experiments to benchmarks/results, renew the tables of docs/evidence.md"
    )
    keep.add_argument("folder", type=Path, nargs="?", help="the --output folder of `run`; none renews the page alone")
    keep.set_defaults(work=_keep)
    stacked = commands.add_parser("stacked", help="train many small models at once on one GPU, and report")
    stacked.add_argument("plan", metavar="NAME", help="a plan of research/plans/stacked")
    stacked.add_argument("--data", type=Path, help="folder with train and valid; none prints the report alone")
    stacked.add_argument("--output", type=Path, default=Path("runs/stacked"), help="(default: %(default)s)")
    stacked.add_argument("--seconds", type=float, default=math.inf, help="start no group that would end later")
    stacked.add_argument("--tiny", action="store_true", help="a try of all groups on a CPU, in minutes")
    stacked.set_defaults(work=_stacked)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops the runs in order, as Ctrl-C does
    try:
        return options.work(options)
    except SentenceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped: the same command continues.", file=sys.stderr)
        return 130


def _run(options: argparse.Namespace) -> int:
    if options.low_priority:  # with all that it starts
        os.nice(19)
        if hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    return int(any([_run_plan(name, options) for name in options.plans]))


def _run_plan(name: str, options: argparse.Namespace) -> list[Run]:
    """Train the runs of a plan; return those that failed."""
    plan = _asked(read_plan(name), options)
    dataset = open_dataset(plan.data)
    tables = read_tables(options.output) if list(options.output.glob("*.plan.json")) else {}
    if plan.tuned_in and plan.tuned_in not in tables:
        print(f"Settings: the best of {plan.tuned_in} in {KEPT}")
        tables[plan.tuned_in] = read_table(KEPT, plan.tuned_in)
    store = Store(options.output, tables)
    entries = entries_of(plan, dataset.digest, settings_of(plan, tables), quick=options.quick)
    runs = list(dict.fromkeys(entry.run for entry in entries))
    left = [run for run in runs if store.result(run) is None]
    tokens = sum(run.steps * run.step_tokens for run in left) / 1e6
    print(f"{plan.name}: {plan.question}\n{len(runs)} runs, {len(left)} left, {tokens:.1f} million tokens", flush=True)
    if options.dry_run:
        print(*(shlex.join(command_of(run, store.folder_of(run), dataset)) for run in left), sep="\n")
        return []
    options.output.mkdir(parents=True, exist_ok=True)
    _refuse_to_lose(plan, tables, entries)
    store.write(plan, entries)

    def changed() -> None:
        store.write(plan, entries)
        print(f"{sum(store.result(entry.run) is not None for entry in entries)} of {len(entries)} runs", flush=True)

    failures = Runner(store, dataset, options.jobs, options.threads).train(left, changed)
    for run in failures:
        print(f"error: a run failed, its log is {store.folder_of(run) / 'log.txt'}", file=sys.stderr)
    if not failures and not options.quick:
        _tell(plan.name, _with_kept_searches(tables | read_tables(options.output)))
    return failures


def _asked(plan: Plan, options: argparse.Namespace) -> Plan:
    """Apply the options of the command line to the plan."""
    sizes = [options.model] if options.model else plan.sizes
    if options.sizes:
        sizes = [size for size in sizes if str(size) in options.sizes]
        if len(sizes) < len(options.sizes):
            raise ResearchError(f"{plan.name} has the sizes {', '.join(map(str, plan.sizes))}")
    return replace(plan, sizes=sizes, seeds=options.seeds or plan.seeds, data=options.data or plan.data)


def _refuse_to_lose(plan: Plan, tables: dict[str, Table], entries: list[Entry]) -> None:
    """Refuse to drop rows: a table may be all that is left of its runs, and is written again with those asked for."""
    asked = {entry.run.digest[:16] for entry in entries}
    kept = tables[plan.name].rows if plan.name in tables else ()
    if lost := [row for row in kept if row["run"] not in asked]:
        raise ResearchError(
            f"{plan.name}.csv has {len(lost)} runs that this command does not ask for, such as {lost[0]['arm']} at "
            f"size {lost[0]['size']}: ask for these as well (--sizes, --seeds), or give another --output"
        )


def _tell(name: str, tables: dict[str, Table]) -> list[analyse.Verdict]:
    print(f"{name}: {tables[name].plan.question}")
    if problems := list(analyse.problems(name, tables)):
        print(*(f"  no conclusion: {problem}" for problem in problems[:5]), sep="\n")
        return []
    verdicts = analyse.judge(name, tables)
    print(*(f"  {verdict}" for verdict in verdicts), sep="\n")
    return verdicts


def _with_kept_searches(tables: dict[str, Table]) -> dict[str, Table]:
    """Add the kept table of each search that a plan takes its settings from, where the folder has none."""
    lacking = {table.plan.tuned_in for table in tables.values() if table.plan.tuned_in} - tables.keys()
    return tables | {name: read_table(KEPT, name) for name in lacking}


def _report(options: argparse.Namespace) -> int:
    tables = read_tables(options.folder)
    verdicts = []
    for name in tables:
        verdicts += _tell(name, _with_kept_searches(tables))
    words = Counter(verdict.word for verdict in verdicts)
    sure = len(pages.surest(verdicts))
    print(f"{', '.join(f'{count} {word.lower()}' for word, count in words.items())}; {sure} tests decided after Holm")
    return 0


def _keep(options: argparse.Namespace) -> int:
    tables = read_tables(options.folder) if options.folder else {}
    known = _with_kept_searches(tables)
    for name, table in tables.items():
        problems = list(analyse.problems(name, known))
        place = KEPT / "unfinished" if problems else KEPT
        place.mkdir(exist_ok=True)
        settings = settings_of(table.plan, known)
        entries = {entry.run.digest[:16]: entry for entry in entries_of(table.plan, table.rows[0]["data"], settings)}
        results = []
        if others := [row for row in table.rows if row["run"] not in entries]:
            raise ResearchError(f"{name}.csv has {len(others)} runs of another plan or of --quick, which are not kept")
        for row in table.rows:
            curves = table.curves.get(row["run"], {})
            results.append((entries[row["run"]], row, {tag: curves[tag] for tag in _KEPT_CURVES if tag in curves}))
        write_table(place, table.plan, results, most=60)
        print(f"{name}: {problems[0] if problems else 'kept'}")
        if not problems:
            for old in (KEPT / "unfinished").glob(f"{name}[.-]*"):
                old.unlink()
    pages.write_pages()
    return 0


def _stacked(options: argparse.Namespace) -> int:
    from research import stacked_plan  # it imports torch

    return stacked_plan.work(options)


if __name__ == "__main__":
    sys.exit(main())
