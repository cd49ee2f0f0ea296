# SPDX-License-Identifier: Apache-2.0
"""Muon, SOAP and Lion in Megatron's own loop with SimReg, and Muon with AdaGC.

`make setup` leaves NVIDIA's emerging-optimizers out: imported before Megatron 0.19's log they take its timers away.
"""

from pathlib import Path

import pytest
import torch

from tests.megatron import runs
from tests.megatron.test_adagc import ADAGC, apart, train

pytest.importorskip("emerging_optimizers", reason="pip install emerging-optimizers==0.3.0 (Python 3.12)")

OPTIMIZERS = ("muon", "soap", "lion")
SCALAR = "simreg_similarity.query"
SIMREG = (*runs.SIMREG, "--simreg-chunk-size", "24", "--simreg-similarity", "learnable")
STEPS = ("--train-iters", "4", "--eval-iters", "0", "--lr-decay-style", "constant")
MUON = ("--optimizer", "muon")
LAYER_WISE = (*MUON, "--use-distributed-optimizer", "--bf16")


def test_lambda_zero_is_plain_megatron(data_flags: tuple[str, ...], tmp_path: Path) -> None:
    flags = (*data_flags, *STEPS, *MUON)
    plain = runs.train(tmp_path / "plain", flags, plain=True)
    off = runs.train(tmp_path / "off", (*flags, "--simreg-lambda", "0"))
    assert plain.losses == off.losses and runs.same_bits(plain, off)
    adam = runs.train(tmp_path / "adam", (*data_flags, *STEPS), plain=True)
    assert adam.losses[0] == plain.losses[0] and adam.losses[1:] != plain.losses[1:], "another optimizer trained"


@pytest.fixture(scope="module")
def adam(data_flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> runs.Recorded:
    return runs.train(tmp_path_factory.mktemp("adam"), (*data_flags, *STEPS, *SIMREG))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_they_step_on_the_same_gradient(optimizer: str, adam: runs.Recorded, data_flags, tmp_path: Path) -> None:
    """And train the scalars of a learned similarity, whose decay stays that of no weight."""
    flags = (*data_flags, *STEPS, *SIMREG, "--optimizer", optimizer)
    got = runs.train(tmp_path / "got", flags)
    assert (got.losses[0], got.norms[0]) == (adam.losses[0], adam.norms[0]) and got.losses[1:] != adam.losses[1:]
    assert got.losses[-1] < got.losses[0] and got.params[SCALAR].item() != 0
    first = (*flags, "--train-iters", "1", "--weight-decay")
    kept, decayed = (runs.train(tmp_path / decay, (*first, decay)) for decay in ("0", "10"))
    assert torch.equal(kept.params[SCALAR], decayed.params[SCALAR]) and not runs.same_bits(kept, decayed)


@pytest.mark.parametrize(("layout", "processes"), [(MUON, 1), (LAYER_WISE, 2)], ids=["one process", "layer-wise"])
def test_going_on_is_never_having_stopped(layout: tuple[str, ...], processes: int, data_flags, tmp_path: Path) -> None:
    flags = (*data_flags, *STEPS, *SIMREG, *layout, *ADAGC)
    whole = train(tmp_path / "whole", flags, processes=processes)
    save = ("--save", str(tmp_path / "saved"), "--save-interval", "2", "--exit-interval", "2")
    train(tmp_path / "stopped", (*flags, *save), processes=processes)
    gone_on = train(tmp_path / "on", (*flags, "--load", str(tmp_path / "saved")), processes=processes)
    assert gone_on.recorded.losses == whole.recorded.losses[2:] and runs.same_bits(gone_on.recorded, whole.recorded)
    assert gone_on.states == whole.states[2:]


@pytest.mark.parametrize(("model", "patch"), [("dense", "adagc"), ("moe", "adagc"), ("dense", "adagc_and_layout")])
def test_adagc_where_each_rank_steps_on_other_parameters(model: str, patch: str, data_flags, tmp_path: Path) -> None:
    """As where both ranks step on all of them. The first step alone has equal weights, up to how bf16 rounds."""
    flags = (*data_flags, *STEPS, *runs.SIMREG, *ADAGC, *MUON, "--bf16", "--lr", "1e-6", "--adagc-warmup-iters", "1")
    every = train(tmp_path / "every", flags, model=model, processes=2)
    spread = train(tmp_path / "spread", (*flags, *LAYER_WISE), model=model, processes=2, patch=patch)
    assert apart([state["gammas"] for state in every.states], [state["gammas"] for state in spread.states]) < 1e-3
    assert apart(every.coefficients, spread.coefficients) < 1e-3
    assert sum(value < 0.999 for value in every.coefficients[-1].values()) > 3, "many are clipped"


def test_without_bf16_they_cannot_be_spread(data_flags: tuple[str, ...], tmp_path: Path) -> None:
    flags = (*data_flags, *STEPS, *ADAGC, *MUON, "--use-distributed-optimizer")
    done = runs.attempt(tmp_path, flags, processes=2)
    assert done.status != 0 and "iteration        1/" not in done.output
    assert "Megatron's layer-wise optimizer, which spreads whole parameters over ranks, need --bf16" in done.output
