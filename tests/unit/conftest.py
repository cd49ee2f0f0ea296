# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the unit tests."""

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports Triton: its kernels run in Python then
    os.environ["TRITON_INTERPRET"] = "1"

from simreg_megatron.losses import simreg
from tests.helpers.ways import limit, small_regions


@pytest.fixture(autouse=True)
def nothing_in_new_memory() -> Iterator[None]:
    """`torch.empty` and its kin give NaN (integers: the largest number), so that a read before a write shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture(params=["reference", "tiled", "tiles of 3", "panels of 3"])
def every_impl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """impl "auto" stands for one implementation after the other, where it has the option."""
    chosen_impl = simreg.chosen_impl

    def chosen(impl: str, *options: str) -> str:
        found = chosen_impl(impl, *options)
        return "reference" if (impl, request.param) == ("auto", "reference") else found

    monkeypatch.setattr(simreg, "chosen_impl", chosen)
    if request.param.endswith("of 3"):
        limit(monkeypatch, side=3)
        limit(monkeypatch, saved=0, work=2048)  # a few chunks at a time
    if request.param == "panels of 3":
        small_regions(monkeypatch)
    return request.param
