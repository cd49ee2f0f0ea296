# SPDX-License-Identifier: Apache-2.0
"""The space: combinations of our flags and Megatron's, drawn by number so that a campaign can go on where it ended."""

from hypothesis import HealthCheck, Phase, given, seed
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.flags import megatrons, ours
from tests.flags.combination import Combination

BATCH = 24
"""Combinations of one number, at most."""
_DRAWN_AT_ONCE = 4  # more would be variants of each other, since hypothesis looks for failures near what it has seen


_SETTINGS = hypothesis_settings(
    max_examples=_DRAWN_AT_ONCE,
    phases=[Phase.generate],
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@st.composite
def combinations(draw: st.DrawFn) -> Combination:
    own = draw(ours.settings())
    groups, processes = draw(megatrons.flags())
    return Combination(own, groups, processes)


def drawn(batch: int) -> list[Combination]:
    """The combinations of one number: always the same ones for one version of hypothesis."""
    found: dict[Combination, None] = {}

    @_SETTINGS
    @given(combinations())
    def draw(combination: Combination) -> None:
        found[combination] = None

    for number in range(batch * BATCH, (batch + 1) * BATCH):  # each begins with the plainest one
        seed(number)(draw)()
        if len(found) >= BATCH:
            break
    return list(found)[1 if batch else 0 : BATCH]
