# SPDX-License-Identifier: Apache-2.0
"""The tables of `benchmarks.objectives` and `benchmarks.objective_cost`: made of their lines, and nothing else."""

from __future__ import annotations

from benchmarks.objectives import OBJECTIVES
from simreg_megatron import SimRegConfig


def test_its_objectives_are_settings_that_exist() -> None:
    for objective, options in OBJECTIVES.values():
        config = SimRegConfig(**({"objective": objective} if objective else {}), objective_options=options)
        assert config.active == bool(objective), "plain Megatron has no flag of the plugin"
