# SPDX-License-Identifier: Apache-2.0
"""A report as one HTML file that asks no network for anything, and as Markdown with its pictures beside it.

What stands in it is put together elsewhere: of one's own runs in `own`, of experiments in `reproduce`.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from simreg_megatron.report.runs import ReportError

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1, h2 { line-height: 1.2 } h2 { margin-top: 3rem; border-top: 1px solid #ccc; padding-top: 1rem }
table { border-collapse: collapse; font-size: 0.85rem; margin: 0.3rem 0 1rem }
th, td { padding: 0.25rem 0.6rem; text-align: right; vertical-align: top }
th:first-child, td:first-child, td.words { text-align: left } th { border-bottom: 1px solid #888 }
tr:nth-child(even) { background: #f4f4f4 }
.wide { overflow-x: auto } figure { margin: 1rem 0 } svg { max-width: 100%; height: auto }
.wide svg { min-width: 34rem }
figcaption, .says { color: #555; font-size: 0.85rem; margin: 0 }
.refused { color: #a00 } code { font-size: 0.8rem; overflow-wrap: anywhere } footer { color: #555; margin-top: 3rem }
@media print {
  body { max-width: none; margin: 0; font-size: 11px } .wide { overflow: visible }
  .wide svg { min-width: 0; max-height: 16cm; width: auto } h2 { margin-top: 1.5rem }
  details::details-content { content-visibility: visible; height: auto }
  h2, figure, table { break-inside: avoid } h2, h2 + p, .says { break-after: avoid }
}
"""
_LAST_WORDS = "## Versions"  # of every report
_SAFE = re.compile(r"[^\w.-]+")


@dataclass(frozen=True)
class Picture:
    """A figure, the stem of its file's name, and what it shows."""

    name: str
    figure: Figure
    says: str


@dataclass(frozen=True)
class Grid:
    """A table; cells are text as it is shown."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    says: str = ""


@dataclass(frozen=True)
class Section:
    """One question and what answers it.

    Attributes:
        refused: why nothing may be concluded; verdicts are left out then.
        notes: what a reader has to know with the verdicts.
        commands: exactly what was run.
    """

    name: str
    question: str
    verdicts: Sequence[str] = ()
    refused: Sequence[str] = ()
    notes: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    grids: Sequence[Grid] = ()
    commands: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    """A report. versions: of what ran and of what made the page."""

    title: str
    sections: Sequence[Section]
    versions: Sequence[str] = field(default=())


def as_html(page: Page) -> str:
    parts = [part for section in page.sections for part in _html_section(section)]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    versions = "".join(f"<li>{escape(line)}</li>" for line in page.versions)
    return (
        f'<!doctype html><html lang="en"><head>{head}<title>{escape(page.title)}</title><style>{_STYLE}</style></head>'
        f"<body><h1>{escape(page.title)}</h1>{''.join(parts)}"
        f"<footer><h2>Versions</h2><ul>{versions}</ul></footer></body></html>\n"
    )


def _html_section(section: Section) -> Iterator[str]:
    yield f'<h2 id="{escape(section.name)}">{escape(section.name)}</h2><p>{escape(section.question)}</p>'
    if section.refused:
        yield f"<p class=refused>No conclusion:</p>{_html_list(section.refused, ' class=refused')}"
    elif section.verdicts:
        yield _html_list(section.verdicts)
    if section.notes:
        yield f"<p class=says>Note:</p>{_html_list(section.notes, ' class=says')}"
    for picture in section.pictures:
        yield f'<figure><div class="wide">{svg(picture.figure)}</div>'
        yield f"<figcaption>{escape(picture.says)}</figcaption></figure>"
    for grid in section.grids:
        if grid.says:
            yield f"<p class=says>{escape(grid.says)}</p>"
        yield f'<div class="wide">{_html_table(grid)}</div>'
    if section.commands:
        lines = "".join(f"<p><code>{escape(line)}</code></p>" for line in section.commands)
        yield f"<details><summary>Commands</summary>{lines}</details>"


def _html_list(sentences: Sequence[str], attributes: str = "") -> str:
    return f"<ul{attributes}>{''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)}</ul>"


def _html_table(grid: Grid) -> str:
    heads = "".join(f"<th>{escape(head)}</th>" for head in grid.heads)
    rows = "".join(f"<tr>{''.join(map(_html_cell, row))}</tr>" for row in grid.rows)
    return f"<table><tr>{heads}</tr>{rows}</table>"


def _html_cell(text: str) -> str:
    words = "" if not text or text[0] in "+-" or text[0].isdigit() else " class=words"
    return f"<td{words}>{escape(text)}</td>"


def as_markdown(page: Page, pictures: str) -> str:
    """The page with links to its pictures in the folder `pictures`."""
    parts = [f"# {page.title}"]
    for section in page.sections:
        parts += _markdown_section(section, pictures)
    parts += [_LAST_WORDS, _markdown_list(page.versions)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _markdown_section(section: Section, folder: str) -> Iterator[str]:
    yield f"## {_plain(section.name)}"
    yield _plain(section.question)
    if section.refused:
        yield "**No conclusion:**"
    yield _markdown_list(section.refused or section.verdicts)
    if section.notes:
        yield f"Note:\n\n{_markdown_list(section.notes)}"
    for picture in section.pictures:
        name = file_name(section, picture)
        says = _plain(picture.says)
        yield f"![{says}]({folder}/{name}.png)\n\n{says} ([SVG]({folder}/{name}.svg))"
    for grid in section.grids:
        rows = [_row(grid.heads), _row(["---"] + ["---:"] * (len(grid.heads) - 1)), *map(_row, grid.rows)]
        yield (f"{_plain(grid.says)}\n\n" if grid.says else "") + "\n".join(rows)
    if section.commands:
        yield "Commands:\n\n```\n" + "\n".join(section.commands) + "\n```"


def _markdown_list(sentences: Sequence[str]) -> str:
    return "\n".join(f"- {_plain(sentence)}" for sentence in sentences)


def _plain(text: str) -> str:
    """One line, of which a name or a question of the user's makes no tag, heading or list."""
    return re.sub(r"^(\d*)([#>+.-]+)(?= )", r"\1\\\2", " ".join(text.split())).replace("<", r"\<")


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_plain(cell).replace('|', chr(92) + '|') for cell in cells)} |"


def file_name(section: Section, picture: Picture) -> str:
    return _SAFE.sub("-", f"{section.name}-{picture.name}")


def write(page: Page, path: Path) -> list[Path]:
    """PATH.html, PATH.md, and the pictures of the latter in the folder PATH-pictures; all are returned.

    Raises:
        ReportError: they cannot be written.
    """
    if path.suffix not in (".html", ".htm") or path.is_dir():
        raise ReportError(f"{str(path)!r} names no HTML file: give --output a name that ends with .html")
    folder = path.with_name(f"{path.stem}-pictures")
    written = [path, path.with_suffix(".md")]
    try:
        _refuse_anothers(written[1])
        folder.mkdir(parents=True, exist_ok=True)
        _write_whole(path, as_html(page))
        _write_whole(written[1], as_markdown(page, folder.name))
        for section in page.sections:
            for picture in section.pictures:
                for kind in ("png", "svg"):
                    written.append(folder / f"{file_name(section, picture)}.{kind}")
                    picture.figure.savefig(written[-1])
    except OSError as error:
        raise ReportError(f"{path} cannot be written ({error.strerror}): give another --output") from None
    return written


def _refuse_anothers(path: Path) -> None:
    """A Markdown file of that name that no report has written: a README beside README.html."""
    if path.is_file() and _LAST_WORDS not in path.read_text(encoding="utf-8", errors="replace"):
        raise ReportError(f"{path} is there and no report of this program: give another --output, or move it away")


def _write_whole(path: Path, text: str) -> None:
    """The file is the old one or the new one, also where the disk is full."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def svg(figure: Figure) -> str:
    """The same text for the same figure, so that a page made again differs only where its numbers do."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "simreg"}):  # of the names of its parts, else drawn at random
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]
