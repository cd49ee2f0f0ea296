# SPDX-License-Identifier: Apache-2.0
"""The tables of `benchmarks.objectives` and `benchmarks.objective_cost`: made of their lines, and nothing else."""

from __future__ import annotations

from benchmarks import objective_cost
from benchmarks.objectives import COLUMNS, OBJECTIVES, PLAIN, mean_and_spread, table
from simreg_megatron import SimRegConfig

WHERE = {
    "date": "2026-11-22", "commit": "abc", "machine": "x86_64 CPU", "cores": "2", "threads": "1", "python": "3.12.1",
    "torch": "2.13.0", "megatron_core": "0.19.2", "steps": "200",
}  # fmt: skip


def line(objective: str, seed: int, loss: float) -> dict[str, str]:
    logged = dict.fromkeys(COLUMNS, "") | {"lm loss validation": str(loss)}
    logged |= {} if objective == PLAIN else {"simreg isotropy": "0.25"}
    weight = OBJECTIVES[objective][0]
    return {"objective": objective, "weight": weight, "seed": str(seed), **logged, **WHERE}


def test_a_row_has_mean_and_spread() -> None:
    plain = [line(PLAIN, 1, 5.0), line(PLAIN, 2, 5.5)]
    rows = list(table([*plain, line("SimReg", 1, 4.0), line("SimReg", 2, 4.5)]))
    assert "**2 seeds**" in rows[1] and "1 thread," in rows[2]
    of_plain, of_simreg = ([cell.strip() for cell in row.strip("|").split("|")] for row in rows[-2:])
    assert of_plain[:4] == [PLAIN, "", "5.250 (0.500)", "not logged"]
    assert of_simreg[:4] == ["SimReg", "simreg:1", "4.250 (0.500)", "0.250 (0.000)"]
    assert (
        of_simreg[4] == "not logged"
        and len(of_simreg) == len(COLUMNS) + 2
        and mean_and_spread([4.0, None], ".1f") == "4.0"
    )


def test_its_objectives_are_settings_that_exist() -> None:
    for objective, options in OBJECTIVES.values():
        config = SimRegConfig(**({"objective": objective} if objective else {}), objective_options=options)
        assert config.active == bool(objective), "plain Megatron has no flag of the plugin"


def test_a_call_is_told_as_a_share_of_plain_and_of_simreg() -> None:
    times = {objective_cost.PLAIN: (400.0, 420.0, 410.0), objective_cost.SIMREG: (80.0, 90.0, 82.0), "MIC": (41.0,)}
    lines = [
        {"call": name, "turn": str(turn), "ms": str(ms), **WHERE}
        for name, taken in times.items()
        for turn, ms in enumerate(taken)
    ]
    rows = list(objective_cost.table(lines))
    assert rows[-3:] == [
        f"| {objective_cost.PLAIN} | 410 | 1 | 5 |",
        f"| {objective_cost.SIMREG} | 82 | 0.2 | 1 |",
        "| MIC | 41 | 0.1 | 0.5 |",
    ]
