# SPDX-License-Identifier: Apache-2.0
"""The baselines against independently computed numbers on the fixture F1, and against written-out loops."""

from __future__ import annotations

import pytest

from simreg_megatron.losses import cpretrain_loss, creg_loss, sce_loss, simcse_loss
from tests.helpers.fixtures import fixture_f1
from tests.unit.test_simreg_facts import assert_prints


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        ({}, "4.790469"),
        ({"form": "per_pair"}, "2.506397"),
        ({"form": "supcon_out"}, "4.996844"),
        ({"self_positive": "always"}, "2.626919"),
        ({"temperature": 0.01}, "41.686364"),
        ({"temperature": 0.01, "form": "per_pair"}, "23.933864"),
        ({"temperature": 0.01, "form": "supcon_out"}, "42.616670"),
        ({"temperature": 0.01, "self_positive": "always"}, "21.802187"),
    ],
)
def test_cr1(options: dict, printed: str) -> None:
    assert_prints(creg_loss(*fixture_f1(), **options), printed)


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        ({}, "3.568870"),
        ({"target_temperature": 0.05}, "3.506406"),
        ({"coupling": 1}, "4.051758"),
        ({"coupling": 0}, "3.085982"),
        ({"target": "instance"}, "1.655349"),
        ({"target": "instance", "target_temperature": 0.05}, "1.592884"),
        ({"target": "instance", "coupling": 1}, "0.224715"),
        ({"target": "instance", "coupling": 0}, "3.085982"),
        ({"exclude_self": True}, "2.393741"),
    ],
)
def test_se1(options: dict, printed: str) -> None:
    assert_prints(sce_loss(*fixture_f1(), **options), printed)


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        ({"temperature": 0.1}, "3.608232"),
        ({"temperature": 0.1, "same_label": "kept"}, "5.53525150634"),
        ({"temperature": 0.05}, "6.486718"),
        ({"temperature": 0.01}, "30.825301"),
    ],
)
def test_cp1(options: dict, printed: str) -> None:
    assert_prints(cpretrain_loss(*fixture_f1(), **options), printed)


def test_sc1() -> None:
    rows, _ = fixture_f1()
    assert_prints(simcse_loss(rows.view(3, 4, 6)), "5.132981")
    assert simcse_loss(rows.view(1, 12, 6)) == 0, "one sequence has nobody to be compared with"
