# SPDX-License-Identifier: Apache-2.0
"""Scripts that use megatron-core alone, without its training loop and its flags."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.megatron import forks, runs


def _main_of(script: str) -> None:
    importlib.import_module(f"tests.megatron.{script}").main()


@pytest.mark.parametrize("name", ["own", "inner", "coexist", "hybrid", "llava", "bridge"])
def test_a_script_of_its_own_needs_no_flags(name: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    status = forks.run_ranks(_main_of, f"{name}_script", processes=1, log=log, timeout=runs.TIMEOUT)
    said = log.read_text()
    assert status == 0 and f"{name} script: all as expected" in said, said[-3000:]
