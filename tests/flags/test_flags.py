# SPDX-License-Identifier: Apache-2.0
"""Some combinations of the space hold what the campaign asks of all, and the judge knows what is wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.flags import campaign, ours
from tests.flags.combination import Combination
from tests.flags.judge import WRONG, judged
from tests.flags.life import Outcome
from tests.flags.space import BATCH, drawn

pytestmark = pytest.mark.megatron

QUICK, SLOW = 3, 15  # combinations; batches
TRAINS = Combination(("--simreg-lambda=3",), ())
SOUND = Outcome(losses=[3.7, 3.6], norms=[2.0, 1.9], logged=[{"simreg loss": 1.0}], terms=[True], digest="a",
                strength=[True, True])  # fmt: skip
PLAIN = Outcome(losses=[3.7, 3.5], norms=[1.0, 1.0], digest="b")


@pytest.mark.parametrize("batch", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, SLOW))])
def test_every_combination_trains_or_is_refused_in_a_sentence(batch: int, tmp_path: Path) -> None:
    for index, combination in enumerate(drawn(batch)[: BATCH if batch else QUICK]):
        verdict = campaign.verdict_on(combination, tmp_path, compared=campaign.is_compared(index, combination))
        assert verdict.kind != WRONG, f"{verdict}\npython -m tests.flags --only {combination}"


def test_every_flag_of_ours_is_in_the_space() -> None:
    from simreg_megatron.config.flags import OF_ADAGC, OF_SIMREG

    of_objectives = {"--simreg-objective", "--simreg-objective-options"}  # drawn by the objectives' records
    assert set(ours.VALUES) | of_objectives == {flag.name for flag in OF_SIMREG}
    assert set(ours.ADAGC) == {flag.name for flag in OF_ADAGC}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (replace(SOUND, losses=[math.nan]), "a loss that is not finite"),
        (replace(SOUND, logged=[{"simreg loss": math.nan}]), "in the log a simreg loss that is not finite"),
        (replace(SOUND, logged=[]), "SimReg is on and not in the log"),
        (replace(SOUND, terms=[]), "SimReg trains and computed no term"),
        (Outcome(error="KeyError", said="'x'", place="plugin/layers.py:take", is_ours=True), "KeyError in plugin"),
        (Outcome(error="ValueError", said="SimReg cannot\ndo it: drop it", place="a.py:f", is_ours=True), "cannot"),
    ],
)
def test_what_must_not_be_is_wrong(found: Outcome, words: str) -> None:
    verdict = judged(TRAINS, [found], lambda _: [PLAIN])
    assert verdict.kind == WRONG and words in verdict.what
