# SPDX-License-Identifier: Apache-2.0
"""The same function in every layout, on real text: losses over three steps and every gradient of the first.

Temperature 0.5 keeps the fp32 noise of reordered sums far below the bounds; at least a tenth of the gradient is
SimReg's, so that an error in it cannot hide.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.megatron import runs
from tests.megatron.runs import SIMREG, Recorded

LOSS_BOUND, GRAD_BOUND = 1e-6, 1e-5  # relative
TP2 = ("--tensor-model-parallel-size", "2")
SP = ("--sequence-parallel",)
PP2 = ("--pipeline-model-parallel-size", "2")
INSIDE = ("--simreg-chunk-size", "16")  # chunks lie inside each half of the 64 tokens
ACROSS = ("--simreg-chunk-size", "24")  # one chunk spans both halves, the last one is shorter
# Unequal counts: the end of each text is masked, and Megatron divides by the tokens of the whole batch.
PER_TOKEN = ("--calculate-per-token-loss", "--eod-mask-loss")


@pytest.fixture(scope="module")
def computed(checkpoint: Path, data_flags: list[str], tmp_path_factory: pytest.TempPathFactory):
    """computed(*flags, processes=N): three steps from the checkpoint with these flags; each run once."""

    @cache
    def run(*flags: str, processes: int = 1) -> Recorded:
        out = tmp_path_factory.mktemp("run")
        start = ("--load", str(checkpoint), "--finetune", "--no-load-optim", "--no-load-rng", "--train-iters", "3")
        done = runs.train(out, [*data_flags, *start, *flags], processes=processes)
        assert done.status == 0, done.output[-4000:]
        return runs.read(out)

    return run


def assert_same(one: Recorded, other: Recorded) -> None:
    difference, name = runs.grad_difference(one, other)
    assert difference <= GRAD_BOUND, f"gradient of {name} differs by {difference:.2e}"
    assert runs.loss_difference(one, other) <= LOSS_BOUND


@pytest.mark.parametrize(
    ("layout", "processes", "objective"),
    [
        pytest.param(TP2, 2, INSIDE, id="tp2"),
        pytest.param((*TP2, *SP), 2, INSIDE, id="tp2-sp-inside"),
        pytest.param((*TP2, *SP), 2, ACROSS, id="tp2-sp-across"),
        pytest.param(PP2, 2, INSIDE, id="pp2"),
        pytest.param((), 2, INSIDE, id="dp2"),
        pytest.param(("--micro-batch-size", "1"), 1, INSIDE, id="half-micro-batch"),
        pytest.param((), 2, (*INSIDE, *PER_TOKEN), id="dp2-per-token-unequal"),
        pytest.param((*TP2, *SP, "--micro-batch-size", "1"), 2, (*ACROSS, *PER_TOKEN), id="tp2-sp-per-token-unequal"),
    ],
)
def test_layouts_compute_the_same(computed, layout, processes: int, objective) -> None:
    assert_same(computed(*SIMREG, *objective), computed(*SIMREG, *objective, *layout, processes=processes))


def test_the_distributed_optimizer_takes_the_same_steps(computed) -> None:
    """It scatters the gradients, so whole ones are nowhere: losses and the trained parameters must agree instead."""
    one = computed(*SIMREG, *INSIDE)
    other = computed(*SIMREG, *INSIDE, "--use-distributed-optimizer", processes=2)
    assert runs.loss_difference(one, other) <= LOSS_BOUND
    # Adam turns the rounding of a gradient near zero into a whole step of that element: compare in norm.
    gaps = {name: one.params[name] - other.params[name] for name in one.params}
    assert runs.total_norm(gaps) <= 1e-5 * runs.total_norm(one.params)


@pytest.mark.parametrize("objective", [INSIDE, ACROSS, (*INSIDE, *PER_TOKEN)], ids=["inside", "across", "per-token"])
def test_simreg_is_a_large_part_of_the_gradient(computed, objective) -> None:
    with_simreg = computed(*SIMREG, *objective).grads
    mode = tuple(flag for flag in objective if flag in PER_TOKEN)
    without = computed(*mode).grads
    share = {name: with_simreg[name] - without[name] for name in with_simreg}
    assert runs.total_norm(share) > 0.1 * runs.total_norm(with_simreg)


def test_a_wrong_scale_is_told(computed) -> None:
    """Twice the weight, as a forgotten division by two ranks would give: far outside the bounds."""
    right = computed(*SIMREG, *INSIDE)
    wrong = computed("--simreg-lambda", "20", *SIMREG[2:], *INSIDE)
    assert runs.grad_difference(right, wrong)[0] > 1000 * GRAD_BOUND
    with pytest.raises(AssertionError, match="gradient of"):
        assert_same(right, wrong)


def test_masked_text_has_unequal_counts(text) -> None:
    """The premise of the per-token runs: sequences of 64 tokens hold different numbers of text ends."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    end = text.manifest["tokens"]["train"]
    lengths = [len(document) for document in IndexedDataset(str(text.train_prefix))]
    assert sum(lengths) == end and len(lengths) > 50
