# SPDX-License-Identifier: Apache-2.0
"""Scripts that use megatron-core alone, without its training loop and its flags."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.megatron import forks, runs


def _main_of(script: str) -> None:
    importlib.import_module(f"tests.megatron.{script}").main()


@pytest.mark.parametrize("script", ["own_script", "inner_script", "coexist_script", "hybrid_script", "bridge_script"])
def test_a_script_of_its_own_needs_no_flags(script: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    status = forks.run_ranks(_main_of, script, processes=1, log=log, timeout=runs.TIMEOUT)
    said = log.read_text()
    assert status == 0 and f"{script.replace('_', ' ')}: all as expected" in said, said[-3000:]
