# SPDX-License-Identifier: Apache-2.0
"""SimReg's launches on a GPU do not grow unseen; the overhead of the benchmarks' steps."""

import csv
from pathlib import Path

import pytest
import torch

from benchmarks import launches, step_pairs
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import report, tiles
from benchmarks.gpu.parts import CALLS
from benchmarks.launches import cases, trace
from benchmarks.records import RESULTS

KEPT = list(csv.DictReader((RESULTS / "launches.csv").open()))  # of `python -m benchmarks.launches`


@pytest.mark.parametrize("case", [case for case in cases() if case.name == "llama-7b"], ids=str)
def test_no_change_adds_launches(case: launches.Case) -> None:
    own = case.name, str(case.chunk or "whole"), case.form, "yes" if case.logs else "no"
    (kept,) = [row for row in KEPT if (row["preset"], row["chunk"], row["impl"], row["log_step"]) == own]
    found = trace(case)
    assert found.launches <= int(kept["launches"]), found.names.most_common(12)
    assert found.moved / 2**20 <= float(kept["moved_mib"]) + 1
    assert found.syncs == 0, "nothing waits for the GPU"


MOST = {"llama-350m": 0.003, "llama-1.3b": 0.0015, "llama-3b": 0.0015, "llama-7b": 0.001, "mixtral-8x1b": 0.0015}


def test_the_fastest_form_takes_no_larger_share_of_a_micro_batch() -> None:
    rows = [row for row in KEPT if (row["impl"], row["chunk"], row["log_step"]) == ("triton", "1024", "no")]
    assert {row["preset"] for row in rows} >= set(MOST)
    for row in rows:
        if row["preset"] in MOST:
            assert float(row["share"]) <= MOST[row["preset"]]
        if row["preset"] == "longer sequences":
            assert int(row["launches"]) <= 32


def test_the_overhead_is_taken_within_windows() -> None:
    """A machine that is twice as slow in its second half says nothing of the runs."""
    assert step_pairs.overhead([1.0] * 5 + [2.0] * 5, [1.1] * 5 + [2.2] * 5)[1:] == pytest.approx((10.0, 10.0, 10.0))
    rising = [1 + window / 100 for window in range(10)]
    assert step_pairs.overhead([1.0] * 10, rising)[1:] == pytest.approx((4.5, 1.0, 8.0)), "sign test: odds of 2.1 %"
    assert step_pairs.overhead([1.0] * 5, [1.1] * 5).high == float("inf"), "five windows give no interval"
    assert list(step_pairs.table([])) == ["No step was measured."]


def test_tiles_are_of_kernels_that_exist() -> None:
    assert all(hasattr(tiles.form, kernel) for kernel in tiles.CHOICES)


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
        assert "| a profiled step | plain | with SimReg |" in page
