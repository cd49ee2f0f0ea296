# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/objectives.md say what the records say."""

from __future__ import annotations

import re

import pytest

from simreg_megatron import objectives
from simreg_megatron.objectives import Objective
from simreg_megatron.objectives.record import OptionKind
from tests.helpers.pages import ROOT

PAGE = (ROOT / "docs/objectives.md").read_text(encoding="utf-8")
BASELINES = ("simcse", "cpretrain", "creg", "sce")
CONTROLS = ("placebo", "none")  # in the text


def row_of(name: str, header: str) -> list[str]:
    """Cells behind the name, in the first table with this header."""
    table = PAGE.partition(header)[2].partition("\n\n")[0]
    (found,) = re.findall(rf"^\| `{name}` \| (.*) \|$", table, re.MULTILINE)
    return re.split(r"(?<!\\) \| ", found)


def as_shown(name: str, known: OptionKind) -> str:
    return f"`{name}=" + (r"\|".join(known) if isinstance(known, tuple) else str(known)) + "`"


@pytest.mark.parametrize("objective", objectives.BUILT_IN.values(), ids=objectives.BUILT_IN)
def test_its_rows(objective: Objective) -> None:
    if objective.name not in BASELINES + CONTROLS:
        assert row_of(objective.name, "| objective | asks for ") == [objective.asks, objective.labels, objective.sent]
    if objective.name != "none":
        (options,) = row_of(objective.name, "| objective | options, the default first |")
        assert [as_shown(*option) for option in objective.options.items() if as_shown(*option) not in options] == []
        assert objective.options or options == "none"


def test_every_control_is_in_the_text() -> None:
    assert all(f"`--simreg-objective {name}`" in PAGE for name in CONTROLS)
