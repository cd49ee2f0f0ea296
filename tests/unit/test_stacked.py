# SPDX-License-Identifier: Apache-2.0
"""Stacked models: K at once are K one by one, plans become groups of runs, and rows the report that is kept."""

import numpy as np
import pytest
import torch

from research.plan import PLANS
from research.stacked import Data, Run, Shape, Stack, train
from research.stacked_plan import Results, read_plan, report
from research.tables import KEPT

SHAPE = Shape(width=32, layers=2, sequence=32, batch=2, vocabulary=128)
RUNS = [
    Run(1, 4e-3, 0.02, 0.1, z=1e-3), Run(2, 2e-3, 0.05, 0.4, 1.0, 8, "permuted"),
    Run(3, 1e-3, 0.02, 0.1, 3.0, 32, "right", off_after=0.6), Run(1, 4e-3, 0.02, 0.1, 2.0, 8, "self"),
]  # fmt: skip


TOKENS = np.random.default_rng(0).integers(0, SHAPE.vocabulary, 2000)
DATA = Data(TOKENS, TOKENS[:500], "cpu")


def test_models_at_once_are_those_one_by_one() -> None:
    together = train(Stack(SHAPE, RUNS, 10, DATA), lambda: 1e9)
    for run, row in zip(RUNS, together, strict=True):
        (alone,) = train(Stack(SHAPE, [run], 10, DATA), lambda: 1e9)
        for name in ("valid", "cosine", "term", "train", *map(str, range(1, 11))):
            assert row[name] == pytest.approx(alone[name], rel=2e-5), name  # six digits are kept
    curves = [[row[str(point)] for point in range(1, 11)] for row in together]
    assert train(Stack(SHAPE, RUNS, 20, DATA), lambda: 0.0) == []  # seconds that are left
    assert len({curve[-1] for curve in curves}) == 4 and curves[0][0] == pytest.approx(curves[3][0])


def test_a_gradient_that_is_not_finite_stays_with_its_model() -> None:
    stack = Stack(SHAPE, [RUNS[0], Run(2, 2e-3, 0.05, 0.0, float("inf"), 8, "right")], 4, DATA)
    alone, before = Stack(SHAPE, RUNS[:1], 4, DATA), stack.weights["head"][1].detach().clone()
    losses = [(stack.step(step)[0].item(), alone.step(step)[0].item()) for step in range(4)]
    assert losses[3] == pytest.approx([losses[3][0]] * 2) and losses[3][0] != losses[0][0]
    assert stack.bad_steps.tolist() == [0, 4] and torch.equal(stack.weights["head"][1], before)


def test_an_arm_is_judged_by_all_of_its_seeds_and_finite_losses() -> None:
    def compared() -> list[str]:
        return [line for line in report(results) if ", p " in line]

    results = Results(read_plan("g1"), KEPT / "stacked")
    rows, whole = results.rows, compared()
    results.rows = [row for row in rows if row["group"] != "b2"]  # half of the seeds of two arms
    assert len(whole) == 16 and not any(line.startswith("- simreg - cross-entropy") for line in compared())
    results.rows = [*rows[:-1], {**rows[-1], "valid": float("nan")}]
    assert compared() == [line for line in whole if rows[-1]["arm"] not in line] != whole


@pytest.mark.parametrize("name", sorted(path.stem for path in (PLANS / "stacked").glob("*.yaml")))
def test_the_reports_that_are_kept_follow_from_their_rows(name: str) -> None:
    read_plan(name, tiny=True)
    kept = KEPT / "stacked" / f"{name}.md"
    if kept.exists():
        text = "\n".join(report(Results(read_plan(name), kept.parent))) + "\n"
        assert kept.read_text() == text, f"research stacked {name} --output {kept.parent}"
