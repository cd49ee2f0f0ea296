# SPDX-License-Identifier: Apache-2.0
"""The numbers of the pages beside the files that they follow from: what benchmarks/ledger.py lists is checked here.

A number with a unit, a difference such as 2e-7, one with three decimals or more, and one that has a cell of a table to
itself must be in the ledger: as a figure (it is computed anew from its file and compared at the precision that the page
prints), in a table that a command makes, or as something that nobody measured here, with the reason. A table between
the marks `<!-- table NAME -->` and `<!-- end of table -->` is benchmarks/results/NAME.md, and needs no entry.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = "benchmarks/results"

_NUMBER = r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?"
_WORDS = (
    "times|ms|s|seconds?|minutes?|hours?|GPU hours|bytes|B|kB|MB|GB|TB|KiB|MiB|GiB|TiB|MB/s|GB/s|tokens/s"
    "|nats|degrees|points|[GT]FLOP(?:/s)?|thousand|million|billion"
)
_UNIT = rf"(?:\s?%|\s(?:{_WORDS})(?![\w/]))"
_CELL = r"(?=\s(?:\||±|\())"
MEASURED = re.compile(
    rf"(?<![\w.,/`-])(?:(?P<range>{_NUMBER})\sto\s)?"
    rf"(?P<number>{_NUMBER}(?={_UNIT})|[-+]?[\d.]+e[-+]?\d+\b|[-+]?\d+\.\d{{3,}}\b(?!\.\d)|(?<=\|\s){_NUMBER}{_CELL})"
)
_TABLE = re.compile(r"<!-- table (?P<name>[\w/-]+) -->\n(?P<text>.*?)<!-- end of table -->\n", flags=re.DOTALL)
_CODE = re.compile(r"(?<!`)`(?!`)[^`]+`(?!`)|\]\([^)]*\)|arXiv [\d.]+")  # flags, addresses and papers measure nothing


@dataclass(frozen=True)
class Source:
    """A committed file, and the command that makes it anew (or, of a test, that checks what it states)."""

    file: str
    command: str


@dataclass(frozen=True)
class Figure:
    """Measured numbers of a page: `text` as it stands there, once, with {} in the place of each; lines may break."""

    page: str
    text: str
    source: Source
    values: Callable[[], Iterable[float]]


@dataclass(frozen=True)
class Made:
    """A part of a page that `command` makes and a test of its own compares.

    It goes from the line that begins with `start` to the next empty one.
    """

    page: str
    start: str
    command: str


@dataclass(frozen=True)
class NotMeasured:
    """Texts of a page whose numbers were not measured here: settings, aims, bounds of a design, figures of others."""

    page: str
    why: str
    texts: tuple[str, ...]


Entry = Figure | Made | NotMeasured


@dataclass(frozen=True)
class Ledger:
    """All that is known about the numbers of `pages`; `awaited` names marked tables that are still to be measured."""

    pages: Sequence[str]
    entries: Sequence[Entry]
    awaited: Sequence[str] = ()


def complaints(ledger: Ledger, root: Path = ROOT) -> list[str]:
    """What is wrong, a sentence each: page and line, the number, and what to do."""
    return [sentence for page in ledger.pages for sentence in _of_page(page, ledger, root)]


def _of_page(page: str, ledger: Ledger, root: Path) -> Iterator[str]:
    text = (root / page).read_text(encoding="utf-8")
    explained: list[tuple[int, int]] = []
    for table in _TABLE.finditer(text):
        explained.append(table.span("text"))
        yield from _of_table(page, table, ledger, root)
    for entry in ledger.entries:
        if entry.page != page:
            continue
        found = _places(entry, text)
        if not found or (isinstance(entry, Figure) and len(found) > 1):
            yield f"{page}: {len(found)} times {_text(entry)!r}, which benchmarks/ledger.py names: change it there, too"
            continue
        explained += [span for match in found for span in _explained(entry, match)]
        if isinstance(entry, Figure):
            yield from _of_figure(entry, found[0])
        if isinstance(entry, Made):
            yield from _of_part(entry, found[0])
    unknown: dict[int, list[str]] = {}
    for start, end in _measured(text):
        if not any(first <= start and end <= last for first, last in explained):
            unknown.setdefault(_line(text, start), []).append(text[start:end])
    for line, numbers in unknown.items():
        yield (
            f"{page}:{line}: nothing says where {', '.join(numbers)} comes from: enter its file and its command in "
            "benchmarks/ledger.py, or why it is no measurement"
        )


def _of_part(part: Made, match: re.Match[str]) -> Iterator[str]:
    place = f"{part.page}:{_line(match.string, match.start())}"
    if part.command not in " ".join(match.string.split()):
        yield f"{place}: does not say that `{part.command}` makes the part that begins with {part.start!r}"


def _of_table(page: str, table: re.Match[str], ledger: Ledger, root: Path) -> Iterator[str]:
    place, name = f"{page}:{_line(table.string, table.start())}", table["name"]
    path = root / RESULTS / f"{name}.md"
    if (is_there := path.is_file()) == (name in ledger.awaited):
        what = "is awaited no more: take it out of AWAITED" if is_there else "is not there: make it by its benchmark"
        yield f"{place}: {RESULTS}/{name}.md {what}"
    elif is_there and path.read_text(encoding="utf-8") != table["text"]:
        yield f"{place}: the table {name} is not what {RESULTS}/{name}.md has: run its benchmark with --from"


def _of_figure(figure: Figure, match: re.Match[str]) -> Iterator[str]:
    source = figure.source
    try:
        compared = list(_compared(figure, match))
    except (OSError, LookupError, ValueError) as error:
        place = f"{figure.page}:{_line(match.string, match.start())}"
        yield f"{place}: {source.file} does not have the numbers of {figure.text!r} ({error}): `{source.command}`"
        return
    for printed, value, where in compared:
        if not agree(printed, value):
            yield (
                f"{figure.page}:{_line(match.string, where)}: {printed} should be {as_printed(value, printed)} by "
                f"{source.file}, where it is {value:.6g}: run `python -m benchmarks.ledger --write`, or make the file "
                f"anew by `{source.command}`"
            )


def write(ledger: Ledger, root: Path = ROOT) -> list[str]:
    """Put the sources' numbers into the pages, each as precise as the number that it replaces; the pages changed."""
    changed = []
    for page in ledger.pages:
        before = text = (root / page).read_text(encoding="utf-8")
        for entry in ledger.entries:
            if isinstance(entry, Figure) and entry.page == page and len(found := _places(entry, text)) == 1:
                for printed, value, where in reversed(list(_compared(entry, found[0]))):
                    if not agree(printed, value):
                        text = text[:where] + as_printed(value, printed) + text[where + len(printed) :]
        if text != before:
            (root / page).write_text(text, encoding="utf-8")
            changed.append(page)
    return changed


def _text(entry: Entry) -> str:
    return entry.text if isinstance(entry, Figure) else entry.start if isinstance(entry, Made) else entry.why


def _places(entry: Figure | Made | NotMeasured, text: str) -> list[re.Match[str]]:
    if isinstance(entry, Made):
        return list(re.finditer(rf"^{re.escape(entry.start)}(?:.+\n)*", text, flags=re.MULTILINE))
    if isinstance(entry, Figure):
        parts = [_spaced(part) for part in entry.text.split("{}")]
        return list(re.finditer(rf"({_NUMBER})".join(parts), text))
    found = [list(re.finditer(_spaced(each), text)) for each in entry.texts]
    return [match for matches in found for match in matches] if all(found) else []


def _spaced(text: str) -> str:
    """A pattern of this text in which a space stands for any run of blanks and line breaks."""
    return r"\s+".join(re.escape(word) for word in re.split(r"\s+", text))


def _explained(entry: Figure | Made | NotMeasured, match: re.Match[str]) -> list[tuple[int, int]]:
    if isinstance(entry, Figure):
        return [match.span(group) for group in range(1, entry.text.count("{}") + 1)]
    return [match.span()]


def _compared(figure: Figure, match: re.Match[str]) -> Iterator[tuple[str, float, int]]:
    """(as printed, as the source has it, where) of each number."""
    values = list(figure.values())
    if len(values) != figure.text.count("{}"):
        raise ValueError(f"{figure.text!r} of {figure.page} has not {len(values)} numbers, as its values in the ledger")
    for group, value in enumerate(values, 1):
        yield match.group(group), value, match.start(group)


def agree(printed: str, value: float) -> bool:
    """Whether `printed` is `value`, rounded as the page rounds."""
    mantissa, _, exponent = printed.replace(",", "").partition("e")
    half = 0.5 * 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return abs(float(mantissa) * 10.0 ** int(exponent or 0) - value) <= half * (1 + 1e-9)


def as_printed(value: float, like: str) -> str:
    """`value` with as many digits as `like` has, and in its form."""
    mantissa, marked, _ = like.partition("e")
    decimals = len(mantissa.partition(".")[2])
    sign = "+" if like[0] in "+-" else ""
    if marked:
        mantissa, _, exponent = f"{value:{sign}.{decimals}e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:{sign}{',' if ',' in like else ''}.{decimals}f}"


def _measured(text: str) -> Iterator[tuple[int, int]]:
    """Where the numbers stand that somebody must have measured."""
    bare = _CODE.sub(lambda match: re.sub(r"[^\n]", "`", match.group()), text)
    for match in MEASURED.finditer(bare):
        for group in ("range", "number"):
            if match.group(group):
                yield match.span(group)


def _line(text: str, where: int) -> int:
    return text.count("\n", 0, where) + 1
