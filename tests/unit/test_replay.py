# SPDX-License-Identifier: Apache-2.0
"""tools/replay.py sees a change of one bit, and asks every objective."""

from __future__ import annotations

import json

import pytest
import torch

from simreg_megatron import objectives
from simreg_megatron.losses import simreg
from tools import replay


def few() -> list[dict[str, object]]:
    return [given for given in replay.settings() if given.get("impl") or given.get("objective") in ("creg", "none")]


def test_a_change_of_one_bit_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = replay.results(few())
    assert not replay.differences(before, replay.results(few()))
    whole = simreg.terms_of_ratio
    monkeypatch.setattr("simreg_megatron.sharded.sequence.terms_of_ratio", lambda *given: _nudged(whole(*given)))
    wrong = replay.differences(before, replay.results(few()))
    assert wrong and all("creg" not in name for name in wrong)
    assert any("tiled" in name for name in wrong) and not any('"reference"' in name for name in wrong)


def _nudged(terms: torch.Tensor) -> torch.Tensor:
    """The next number above, of one term that is not 0."""
    place = torch.zeros_like(terms)
    place[0, terms[0].argmax()] = torch.finfo(terms.dtype).eps
    return terms * (1 + place)


def test_every_objective_is_asked() -> None:
    found = list(replay.settings())
    assert {given.get("objective", "simreg") for given in found} >= set(objectives.names())
    for name, objective in objectives.BUILT_IN.items():
        asked = json.dumps([given for given in found if given.get("objective") == name])
        assert all(f"{option}=" in asked for option in objective.options), name
