# SPDX-License-Identifier: Apache-2.0
"""The table of `benchmarks.evaluation`: each figure beside the sample that it is of."""

from __future__ import annotations

from benchmarks.evaluation import FEATURES, MODELS, row, table
from simreg_megatron.evaluation.results import ModelResults, Perplexity, Score
from tests.helpers.questions import NAME


def test_a_row_is_of_one_model() -> None:
    score = Score("acc", 0.25, 0.0125, 500)
    losses = [Perplexity(loss, 1000, 256, features) for loss, features in ((4.0, 192), (5.0, 96), (6.0, 48))]
    rows = [row(ModelResults(name, "path", {NAME: score}, losses), 4.5, 400) for name in MODELS]
    assert [one["flags"] for one in rows[:2]] == [
        "--simreg-objective none", "--simreg-lambda 1 --simreg-chunk-size 64"
    ]  # fmt: skip
    assert (rows[0]["loss"], rows[0]["loss_48"], rows[0]["valid_tokens"]) == (4.0, 6.0, 1000)
    lines = list(table(rows))
    assert "of 500 questions" in lines[0] and "of all 1000 tokens" in lines[0]
    assert lines[-3] == "| cross-entropy | 25.0 (1.2) | 4.0000 | 5.000 | 6.000 | 4.5000 |"
    assert {line.count("|") for line in lines[2:]} == {5 + len(FEATURES)}
