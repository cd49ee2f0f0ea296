# SPDX-License-Identifier: Apache-2.0
"""What tests/gpu is made of, on a CPU: a first machine with a GPU must not be where its helpers are tried."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu import runs
from tests.gpu.runs import ANOTHER_NORM, LOCAL, SIMREG, Run
from tests.megatron import runs as tiny
from tests.megatron import text


@pytest.mark.slow
def test_a_rank_observes_and_compares(tmp_path: Path) -> None:
    """Two tiny trainings: the gradient is the reference's, the language-model loss is left alone, the log is there."""
    pytest.importorskip("megatron.training")
    corpus = text.make_corpus(tmp_path / "corpus")
    data = text.flags(corpus, tmp_path / "cache")
    run = Run((*LOCAL, *SIMREG), compares=True, half=False, on_cpu=True)
    seen = runs.observe(run, data, tmp_path / "seen")
    assert seen.comparison is not None and seen.comparison["value"] == 0
    assert seen.comparison["gradient"] < 1e-4 and seen.comparison["share"] > 0.1
    assert len(seen.losses) == len(seen.norms) == len(seen.logged) == runs.STEPS
    assert [line["simreg loss"] for line in seen.logged] == pytest.approx(seen.simreg_losses(), rel=1e-5)
    wrong = runs.observe(run.with_flags("--simreg-lambda", "20"), data, tmp_path / "wrong")
    assert runs.largest_gap(seen.norms, wrong.norms) > 0.5


@pytest.mark.slow
def test_norms_with_a_state_start_from_a_checkpoint_of_norms_without_one(tmp_path: Path) -> None:
    """As on a GPU with Transformer Engine, from a checkpoint that a CPU has saved."""
    pytest.importorskip("megatron.training")
    data = text.flags(text.make_corpus(tmp_path / "corpus"), tmp_path / "cache")
    save = ("--save", str(tmp_path / "saved"), "--save-interval", "2", "--train-iters", "2")
    tiny.train(tmp_path / "first", (*data, *save))
    load = ("--load", str(tmp_path / "saved"), "--finetune", "--no-load-optim", "--no-load-rng", "--train-iters", "1")
    start = (*data, *load)
    expected = tiny.train(tmp_path / "usual", start).losses
    patch = "breakage:norms_with_state"
    refused = tiny.attempt(tmp_path / "refused", start, patch=patch)
    assert refused.status != 0 and "_extra_state" in refused.output
    assert tiny.train(tmp_path / "other", (*start, *ANOTHER_NORM), patch=patch).losses == expected
