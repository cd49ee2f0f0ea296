# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML page of all experiments in a folder: question, figures, verdicts, numbers, commands."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from simreg_megatron.reproduce import figures
from simreg_megatron.reproduce.check import Table, violations
from simreg_megatron.reproduce.verdict import Verdict, judge

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1, h2 { line-height: 1.2 } h2 { margin-top: 3rem; border-top: 1px solid #ccc; padding-top: 1rem }
table { border-collapse: collapse; font-size: 0.85rem } th, td { padding: 0.25rem 0.6rem; text-align: right }
th:first-child, td:first-child { text-align: left } th { border-bottom: 1px solid #888 }
tr:nth-child(even) { background: #f4f4f4 }
.wide { overflow-x: auto } svg { max-width: 100%; height: auto } .refused { color: #a00 } code { font-size: 0.8rem }
@media print { body { max-width: none; font-size: 11px } details { display: none } }
@media print { h2, svg, table { break-inside: avoid } }
"""
_MEASURES = {"validation_loss": "validation loss", "bits_per_byte": "bits per byte", "seconds_per_step": "s per step"}


def html_page(tables: dict[str, Table]) -> str:
    """The page; it asks no network for anything."""
    parts = [part for name in tables for part in _experiment(name, tables)]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f'<!doctype html><html lang="en"><head>{head}<title>SimReg: experiments</title><style>{_STYLE}</style></head>'
        f"<body><h1>SimReg: experiments</h1>{''.join(parts)}</body></html>\n"
    )


def _experiment(name: str, tables: dict[str, Table]) -> Iterator[str]:
    table = tables[name]
    source = f" ({escape(table.plan.source)} of the paper)" if table.plan.source else ""
    yield f'<h2 id="{escape(name)}">{escape(name)}</h2><p>{escape(table.plan.question)}{source}</p>'
    refused = violations(name, tables)
    if refused:
        yield "<p class=refused>No conclusion:</p><ul class=refused>"
        yield "".join(f"<li>{escape(sentence)}</li>" for sentence in refused[:10]) + "</ul>"
    else:
        yield from _verdicts(judge(table.plan, table.rows))
    yield f'<div class="wide">{figures.ends(table)}</div><div class="wide">{figures.curves(table)}</div>'
    yield f'<div class="wide">{_means(table)}</div>'
    yield f"<details><summary>Commands</summary>{_commands(table)}</details>"


def _verdicts(verdicts: list[Verdict]) -> Iterator[str]:
    if verdicts:
        rows = "".join(f"<li>{escape(verdict.sentence)}</li>" for verdict in verdicts)
        yield f"<ul>{rows}</ul>"


def _means(table: Table) -> str:
    """Mean over seeds of each arm at each size and length."""
    heads = ("arm", "size", "tokens a parameter", "runs", "steps", *_MEASURES.values())
    rows = []
    for key in dict.fromkeys(
        (row["arm"], row["size"], row["tokens_per_parameter"], row["steps"]) for row in table.rows
    ):
        own = [row for row in table.rows if (row["arm"], row["size"], row["tokens_per_parameter"], row["steps"]) == key]
        arm, size, ratio, steps = key
        rows.append(
            (arm, size, ratio, str(len(own)), steps, *(_mean([row[name] for row in own]) for name in _MEASURES))
        )
    cells = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{escape(head)}</th>' for head in heads)}</tr>{cells}</table>"


def _mean(values: list[str]) -> str:
    there = [float(value) for value in values if value]
    return f"{sum(there) / len(there):.4g}" if there else "-"


def _commands(table: Table) -> str:
    script = f"launch/pretrain_{table.plan.family}.sh"
    lines = [
        f"{row['arm']}, seed {row['seed']}, commit {row['commit']}: bash {script} {row['flags']}" for row in table.rows
    ]
    return "".join(f"<p><code>{escape(line)}</code></p>" for line in lines)
