# SPDX-License-Identifier: Apache-2.0
"""The table of `benchmarks.objectives`: means and spreads over seeds, and nothing that was not logged."""

from __future__ import annotations

import numpy as np

from benchmarks.objectives import COLUMNS, OBJECTIVES, TIME, _table, mean_and_spread
from simreg_megatron import SimRegConfig
from simreg_megatron.report import Run
from simreg_megatron.report.runs import Series


def run_with(loss: float) -> Run:
    steps = np.array([100, 200])
    logged = {"lm loss validation": [9.0, loss], "simreg isotropy": [0.5, 0.25], TIME: [0.2, 0.4]}
    return Run("run", {tag: Series(steps, np.array(values)) for tag, values in logged.items()})


def test_a_row_has_the_mean_and_spread_of_the_last_values() -> None:
    lines = list(_table({"SimReg": [run_with(4.0), run_with(4.5)]}, 2, 200))
    assert "2 seeds" in lines[0]
    cells = [cell.strip() for cell in lines[-1].strip("|").split("|")]
    assert cells[:4] == ["SimReg", "simreg:1", "4.250 (0.500)", "0.250 (0.000)"]
    assert cells[4] == "not logged" and cells[-1] == "300" and len(cells) == len(COLUMNS) + 3
    assert mean_and_spread([4.0, None], ".1f") == "4.0"


def test_its_objectives_are_settings_that_exist() -> None:
    for objective, options in OBJECTIVES.values():
        assert SimRegConfig(objective=objective, objective_options=options).active
