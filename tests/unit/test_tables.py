# SPDX-License-Identifier: Apache-2.0
"""Generated tables are as new as the code under them, and the digest that tells so counts what matters alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import tables
from tools.tables import TABLES, Table


@pytest.mark.parametrize("name", TABLES)
def test_the_table_is_of_the_code_that_is_here(name: str) -> None:
    assert not (why := tables.why_stale(name)), why


def test_every_tolerated_change_is_of_a_table_as_it_stands() -> None:
    made = {name: tables.stamp_of(tables.ROOT / table.page) for name, table in TABLES.items()}
    for one in tables.tolerances():
        stamp = made[one.table]
        assert stamp and stamp.code == one.made_from, f"the table was made again: remove the line of {one.reason!r}"


CODE = '''
"""A module."""
SCALE = 0.5

def scaled(x):
    """x / 2."""
    if x < 0:
        raise ValueError(f"x is {x}, below 0")
    return SCALE * x  # half
'''


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One table, of a folder of code and a file that is no Python."""
    monkeypatch.setattr(tables, "TABLES", {"sums": Table("page.md", "sums", 3, ("code/**/*.py", "*.patch"))})
    (tmp_path / "code").mkdir()
    (tmp_path / "tools").mkdir()
    (tmp_path / "code" / "a.py").write_text(CODE)
    (tmp_path / "a.patch").write_text("+ line\n")
    (tmp_path / tables.TOLERATED).write_text("# TABLE, digests, reason\n")
    (tmp_path / "page.md").write_text(f"# Sums\n\n{tables.stamp('sums', tmp_path)}\n\n| 1 |\n")
    return tmp_path


def edit(project: Path, before: str, after: str) -> None:
    file = project / "code" / "a.py"
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("# half", "# one half"),
        ('"""x / 2."""', '"""Half of x, at length."""'),
        ('"""A module."""', ""),
        ("SCALE * x", "(SCALE\n            * x)"),
        (", below 0", " and must not be below 0: give another"),
    ],
    ids=["comment", "docstring", "no docstring", "format", "words of an error"],
)
def test_what_python_does_not_read_does_not_count(before: str, after: str, project: Path) -> None:
    edit(project, before, after)
    assert tables.why_stale("sums", project) == ""


@pytest.mark.parametrize(
    ("before", "after"),
    [("0.5", "0.25"), ("x < 0", "x <= 0"), ("SCALE * x", "x * SCALE"), ("{x}, below", "{-x}, below")],
)
def test_what_python_reads_counts(before: str, after: str, project: Path) -> None:
    edit(project, before, after)
    why = tables.why_stale("sums", project)
    assert "page.md" in why and "make tables ONLY=sums" in why and "3 minutes" in why


@pytest.mark.parametrize("change", ["new", "gone", "renamed", "patch"])
def test_files_count(change: str, project: Path) -> None:
    code = project / "code" / "a.py"
    if change == "patch":
        (project / "a.patch").write_text("+ another line\n")
    elif change == "new":
        (code.parent / "inner").mkdir()
        (code.parent / "inner" / "b.py").touch()
    else:
        (code.parent / "b.py").write_text(CODE if change == "renamed" else "")
        code.unlink()
    assert tables.why_stale("sums", project)


def test_a_tolerance_is_for_one_change_and_has_a_reason(project: Path) -> None:
    edit(project, "def scaled", "NAME = 'scaled'\n\ndef scaled")
    line = tables.why_stale("sums", project).rpartition(": ")[2]
    file = project / tables.TOLERATED
    file.write_text(line.replace("REASON", "a name that nothing reads") + "\n")
    assert tables.why_stale("sums", project) == ""
    edit(project, "0.5", "0.25")
    assert tables.why_stale("sums", project)
    file.write_text(line.replace("REASON", "") + "\n")
    with pytest.raises(ValueError, match="a reason"):
        tables.why_stale("sums", project)
