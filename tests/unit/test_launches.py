# SPDX-License-Identifier: Apache-2.0
"""SimReg's launches on a GPU are counted rightly, and do not grow unseen."""

from __future__ import annotations

import csv

import pytest

from benchmarks import launches
from benchmarks.launches import cases, trace
from benchmarks.records import RESULTS

KEPT = list(csv.DictReader((RESULTS / "launches.csv").open()))
SOME = ("llama-7b",)


@pytest.mark.parametrize("case", [case for case in cases() if case.name in SOME], ids=str)
def test_no_change_adds_launches(case: launches.Case) -> None:
    """After one that takes some away: `python -m benchmarks.launches`."""
    own = case.name, str(case.chunk or "whole"), case.form, "yes" if case.logs else "no"
    (kept,) = [row for row in KEPT if (row["preset"], row["chunk"], row["impl"], row["log_step"]) == own]
    found = trace(case)
    assert found.launches <= int(kept["launches"]), found.names.most_common(12)
    assert found.moved / 2**20 <= float(kept["moved_mib"]) + 1
    assert found.syncs == 0, "nothing waits for the GPU"


MOST = {"llama-350m": 0.003, "llama-1.3b": 0.0015, "llama-3b": 0.0015, "llama-7b": 0.001, "mixtral-8x1b": 0.0015}
"""Of a micro-batch, in the steps that are not logged."""


def test_the_fastest_form_costs_no_more_than_we_allow() -> None:
    rows = [row for row in KEPT if (row["impl"], row["chunk"], row["log_step"]) == ("triton", "1024", "no")]
    assert {row["preset"] for row in rows} >= set(MOST)
    for row in rows:
        if row["preset"] in MOST:
            assert float(row["share"]) <= MOST[row["preset"]]
        if row["preset"] == "longer sequences":
            assert int(row["launches"]) <= 32
