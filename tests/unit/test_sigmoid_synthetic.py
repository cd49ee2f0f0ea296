# SPDX-License-Identifier: Apache-2.0
"""The synthetic experiments of the sigmoid loss, shortened (facts SL-9), and the constellation of two sets."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from benchmarks import constellation as constellations
from benchmarks.constellation import constellation
from benchmarks.sigmoid_synthetic import FIXED_BIAS, LOCKED, trained
from simreg_megatron.losses.similarity import unit_rows
from tests.helpers.fixtures import fixture_f1


@pytest.mark.slow
def test_sl9_the_margin_follows_the_relative_bias() -> None:
    runs = [run for run in FIXED_BIAS if run.bias in (0.0, 0.5)]
    ended = trained(runs, steps=1500)
    for run, end, margin in zip(runs, ended, (0.156, 0.217), strict=True):
        assert end.margin == pytest.approx(margin, abs=0.03) and end.accuracy == 1, run
        assert end.margin == pytest.approx(float(run.paper), abs=0.03), "twice the margin is printed there"


@pytest.mark.slow
def test_sl9_with_one_side_locked_a_relative_bias_separates_first() -> None:
    """A margin above 0: one threshold on the cosine tells every partner from all others."""
    fixed, absolute, relative = trained([LOCKED[1], LOCKED[2], LOCKED[3]], locked=True, steps=1000)
    assert fixed.margin < -0.4 and fixed.accuracy < 0.5, "t and b fixed: never"
    assert absolute.margin < 0 and absolute.accuracy < 1, "not yet"
    assert relative.margin == pytest.approx(0.117, abs=0.03) and relative.accuracy == 1
    assert relative.relative_bias == pytest.approx(0.754, abs=0.05)


def test_sl3_margins_of_constructions() -> None:
    """Axes with a shared direction for each of two or three modalities: margins are known."""
    axes = torch.eye(4, dtype=torch.float64)
    rest = math.sqrt(1 - 0.6**2 - 0.5**2)
    sides = [torch.cat([0.6 * axes, torch.tensor([[0.5, sign * rest]]).double().expand(4, -1)], -1) for sign in (1, -1)]
    found = constellation(*sides)
    assert (found.margin.item(), found.bias.item()) == pytest.approx((0.18, 0.04))
    assert (
        found.accuracy == 1 and found.gap.item() == pytest.approx(2 * rest) and found.shift.item() == pytest.approx(0)
    )
    corners = torch.tensor([[1, 0], [-0.5, 0.75**0.5]], dtype=torch.float64)
    code = 0.5**0.5 * torch.cat([axes, torch.ones(4, 1, dtype=torch.float64)], -1)  # cosines of 1/2
    sides = [torch.cat([0.8 * code, 0.6 * corner.expand(4, -1)], -1) for corner in corners]
    found = constellation(*sides)
    assert (found.margin.item(), found.bias.item()) == pytest.approx((0.16, 0.30)), "the source prints another bias"


@pytest.mark.parametrize(("modalities", "bias"), [(3, 0.14), (4, 0.20)])
def test_sl3_orthogonal_codes_of_several_modalities(modalities: int, bias: float) -> None:
    """Construction 2 with alpha 0: axes, and a corner of a simplex for each modality."""
    axes = torch.eye(5, dtype=torch.float64)
    corners = unit_rows(torch.eye(modalities, dtype=torch.float64) - 1 / modalities)
    turned = [torch.cat([0.8 * axes, 0.6 * corner.expand(5, -1)], -1) for corner in corners]
    for one, other in itertools.permutations(turned, 2):
        found = constellation(one, other)
        assert (found.margin.item(), found.bias.item()) == pytest.approx((0.32, bias))


def test_sl6_the_shift_of_the_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = fixture_f1()[0]
    found = constellation(rows[:6], rows[6:])
    assert found.shift.item() == pytest.approx(1.091245, abs=6e-7)
    units = unit_rows(rows)
    cosines = units[:6] @ units[6:].mT
    least = cosines.diagonal().min()
    most = cosines.masked_fill(torch.eye(6, dtype=torch.bool), -2).max()
    assert found.margin == (least - most) / 2 and found.bias == (least + most) / 2
    assert found.accuracy == (cosines.argmax(-1) == torch.arange(6)).double().mean()
    monkeypatch.setattr(constellations, "_ROWS_AT_ONCE", 1)
    torch.testing.assert_close(tuple(constellation(rows[:6], rows[6:])), tuple(found))
