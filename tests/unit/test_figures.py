# SPDX-License-Identifier: Apache-2.0
"""Every measured number of the README and the guides follows from a committed file, and the check can fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.figures import ROOT, Figure, Ledger, Made, NotMeasured, Source, agree, as_printed, complaints, write
from benchmarks.ledger import LEDGER, MADE_PAGES

PAGE = """\
# What it costs

A step takes 2.5 % longer, with 12,345 tokens/s
and an error of 2e-7. Its aim was 5 %; `--reserve 10 minutes` is a flag, torch 2.13.0 a release.

| run | loss |
| --- | --- |
| plain | 4.2338 |
| made | 17 |

`python -m made` writes the last row.
"""
SOURCE = Source("results.csv", "python -m measure")


def figure(text: str, *values: float) -> Figure:
    return Figure("page.md", text, SOURCE, lambda: values)


ENTRIES = (
    figure("takes {} % longer, with {} tokens/s and an error of {}.", 2.46, 12345.4, 1.6e-7),
    figure("| plain | {} |", 4.23384),
    NotMeasured("page.md", "an aim", ("aim was 5 %",)),
    Made("page.md", "| made |", "python -m made"),
)


@pytest.fixture
def checked(tmp_path: Path) -> Callable[..., list[str]]:
    def check(*entries: Figure | Made | NotMeasured, page: str = PAGE) -> list[str]:
        (tmp_path / "page.md").write_text(page)
        return complaints(Ledger(("page.md",), entries), tmp_path)

    return check


def test_the_pages_numbers_follow_from_their_files() -> None:
    assert not (found := complaints(LEDGER)), "\n" + "\n".join(found)


def test_every_page_is_read() -> None:
    pages = {str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))}
    assert pages <= {*LEDGER.pages, *MADE_PAGES}, "enter the new page in benchmarks/ledger.py"


@pytest.mark.parametrize("page", MADE_PAGES)
def test_a_page_that_a_command_makes_names_it(page: str) -> None:
    assert MADE_PAGES[page] in (ROOT / page).read_text(encoding="utf-8")


def test_a_page_that_agrees_has_no_complaints(checked: Callable[..., list[str]]) -> None:
    assert checked(*ENTRIES) == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (figure("takes {} % longer, with {} tokens/s and an error of {}.", 2.56, 12345, 2e-7), ":3: 2.5 should be 2.6"),
        (
            figure("takes {} % longer, with {} tokens/s and an error of {}.", 2.5, 12346, 2e-7),
            "12,345 should be 12,346",
        ),
        (
            figure("takes {} % longer, with {} tokens/s and an error of {}.", 2.5, 12345, 3e-7),
            ":4: 2e-7 should be 3e-7",
        ),
        (figure("takes {} % longer", 2.5), ":3: nothing says where 12,345 comes from"),
        (figure("takes {} % shorter", 2.5), "0 times 'takes {} % shorter'"),
        (figure("takes {} % longer, with {}", 2.5), "does not have the numbers"),
    ],
)
def test_a_wrong_number_is_named_with_its_line(wrong: Figure, said: str, checked: Callable[..., list[str]]) -> None:
    assert any(said in sentence for sentence in checked(wrong, *ENTRIES[1:]))


@pytest.mark.parametrize(
    ("left_out", "said"), [(1, ":8: nothing says where 4.2338"), (2, "5 comes"), (3, ":9: nothing")]
)
def test_a_number_that_nobody_entered_is_named(left_out: int, said: str, checked: Callable[..., list[str]]) -> None:
    (sentence,) = checked(*ENTRIES[:left_out], *ENTRIES[left_out + 1 :])
    assert said in sentence and "benchmarks/ledger.py" in sentence


def test_an_entry_of_what_is_gone_is_named(checked: Callable[..., list[str]]) -> None:
    gone = dataclasses.replace(ENTRIES[2], texts=("aim was 5 %", "aim was 6 %"))
    assert any("an aim" in sentence for sentence in checked(*ENTRIES[:2], gone, ENTRIES[3]))


def test_a_made_part_names_its_command(checked: Callable[..., list[str]]) -> None:
    (sentence,) = checked(*ENTRIES, page=PAGE.replace("python -m made", "python"))
    assert "does not say that `python -m made`" in sentence


def test_a_marked_table_is_its_file(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("<!-- table one -->\n| 17 |\n<!-- end of table -->\n")
    known, awaited = Ledger(("page.md",), ()), Ledger(("page.md",), (), awaited=("one",))
    assert "page.md:1: benchmarks/results/one.md is not there" in complaints(known, tmp_path)[0]
    assert complaints(awaited, tmp_path) == []
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "one.md").write_text("| 17 |\n")
    assert complaints(known, tmp_path) == []
    assert "take it out of AWAITED" in complaints(awaited, tmp_path)[0]
    (tmp_path / "benchmarks" / "results" / "one.md").write_text("| 18 |\n")
    assert "is not what benchmarks/results/one.md has" in complaints(known, tmp_path)[0]


def test_a_file_that_is_missing_is_named_with_its_command(checked: Callable[..., list[str]]) -> None:
    missing = dataclasses.replace(ENTRIES[1], values=lambda: [float((ROOT / "not there").read_text())])
    (sentence,) = checked(ENTRIES[0], missing, *ENTRIES[2:])
    assert "page.md:8" in sentence and "results.csv" in sentence and "`python -m measure`" in sentence


@pytest.mark.parametrize(
    ("printed", "value", "same"),
    [
        ("2.5", 2.549, True),
        ("2.5", 2.551, False),
        ("66", 66.4, True),
        ("1,419", 1419.4, True),
        ("-0.2393", -0.23926, True),
        ("-0.2393", 0.23926, False),
        ("2e-7", 2.4e-7, True),
        ("2e-7", 2.6e-7, False),
        ("0.9e-4", 9.4e-5, True),
        ("0.9e-4", 9.6e-5, False),
    ],
)
def test_a_number_agrees_at_the_precision_that_is_printed(printed: str, value: float, same: bool) -> None:
    assert agree(printed, value) is same
    assert agree(as_printed(value, printed), value)


def test_writing_puts_the_files_numbers_into_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    entries = (figure(ENTRIES[0].text, 3.14159, 999.2, 4.44e-6), figure(ENTRIES[1].text, 4.1), *ENTRIES[2:])
    ledger = Ledger(("page.md",), entries)
    assert write(ledger, tmp_path) == ["page.md"]
    assert "3.1 % longer, with 999 tokens/s\nand an error of 4e-6." in page.read_text()
    assert "| plain | 4.1000 |" in page.read_text()
    assert complaints(ledger, tmp_path) == [] and write(ledger, tmp_path) == []
