# SPDX-License-Identifier: Apache-2.0
"""`make gpu` without a GPU: both calls with `--pretend`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import report
from benchmarks.gpu.parts import CALLS


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_pretend_goes_all_the_way_on_a_cpu(call: str, tmp_path: Path) -> None:
    pytest.importorskip("megatron.training")
    assert gpu.main(["--pretend", "--output", str(tmp_path), "--calls", call]) == 0
    page = (tmp_path / "report.md").read_text()
    assert report.PRETENDED in page and "## Failed\n\nNothing.\n" in page
    assert f"| torch | {torch.__version__} |" in page and "| transformer-engine | " in page
    if call == "a":
        assert "| `test_mamba::test_mamba_layers` | skip | 0.0 | torch sees no CUDA device |" in page
        assert all(f"\n| {name} | 1 | " in page for name in ("plain", "simreg", "launch", "mixtral", "save"))
        assert "\n| resume | 7 | " in page, "it goes on where save ended"
    else:
        assert "| 2 x 64 x 32, float32 | tiled | " in page and "No table" not in page
        assert "| SimReg, chunks | time on the wall | " in page and "--hidden-size 32" in page
        assert "| a profiled step | plain | with SimReg |" in page and "## steps-350m" in page
