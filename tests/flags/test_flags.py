# SPDX-License-Identifier: Apache-2.0
"""Some combinations of the space hold what the campaign asks of all."""

from pathlib import Path

import pytest

from tests.flags import campaign, ours
from tests.flags.judge import WRONG
from tests.flags.space import BATCH, drawn

pytestmark = pytest.mark.megatron

QUICK, SLOW = 3, 15  # combinations; batches


@pytest.mark.parametrize("batch", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, SLOW))])
def test_every_combination_trains_or_is_refused_in_a_sentence(batch: int, tmp_path: Path) -> None:
    for index, combination in enumerate(drawn(batch)[: BATCH if batch else QUICK]):
        verdict = campaign.verdict_on(combination, tmp_path, compared=campaign.is_compared(index, combination))
        assert verdict.kind != WRONG, f"{verdict}\npython -m tests.flags --only {combination}"


def test_every_flag_of_ours_is_in_the_space() -> None:
    from simreg_megatron.config.flags import ADAGC_FLAGS, SIMREG_FLAGS

    of_objectives = {"--simreg-objective", "--simreg-objective-options"}  # drawn by the objectives' records
    assert set(ours.VALUES) | of_objectives == {flag.name for flag in SIMREG_FLAGS}
    assert set(ours.ADAGC) == {flag.name for flag in ADAGC_FLAGS}
