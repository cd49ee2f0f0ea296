# SPDX-License-Identifier: Apache-2.0
"""Scripts that use megatron-core alone, without its training loop and its flags."""

import importlib
from pathlib import Path

import pytest

from tests.megatron import forks, runs


def _main_of(script: str) -> None:
    importlib.import_module(f"tests.megatron.{script}").main()


@pytest.mark.parametrize("name", ["own", "inner", "coexist", "hybrid", "llava", "bridge"])
def test_a_script_of_its_own_needs_no_flags(name: str, tmp_path: Path) -> None:
    log, processes = tmp_path / "log", 2 if name == "llava" else 1  # as tensor-parallel ranks
    status = forks.run_ranks(_main_of, f"{name}_script", processes=processes, log=log, timeout=runs.TIMEOUT)
    said = log.read_text()
    assert status == 0 and f"{name} script: all as expected" in said, said[-3000:]


def test_a_hybrid_of_attention_and_mlp_computes_what_gpt_does(data_flags: tuple[str, ...], tmp_path: Path) -> None:
    """Each layer of GPTModel as two of HybridModel, with SimReg: the same bits in losses, gradients and the log."""
    flags = [*data_flags, *runs.SIMREG, "--simreg-chunk-size", "16", "--train-iters", "3"]
    hybrid = ("--hybrid-layer-pattern", "*-*-", "--spec", "simreg_megatron.cpu.hybrid", "LOCAL")
    gpt, other = (runs.train(tmp_path / f"{len(more)}", [*flags, *more]) for more in ((), hybrid))
    assert repr((gpt.losses, gpt.norms, gpt.logged)) == repr((other.losses, other.norms, other.logged)), "NaN or not"
    weights = [sorted(each.numpy().tobytes() for each in run.params.values()) for run in (gpt, other)]
    assert weights[0] == weights[1] and len(gpt.losses) == 3, "by other names"
    assert "SimReg: regularises HybridModel" in (tmp_path / "5" / "log").read_text()
    done = runs.attempt(tmp_path / "mamba", [*flags, *hybrid, "--hybrid-layer-pattern", "*M"])
    assert done.status != 0 and "--hybrid-layer-pattern has layers M, and without" in done.output
