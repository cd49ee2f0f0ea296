# SPDX-License-Identifier: Apache-2.0
"""On two GPUs with Transformer Engine: every layout agrees with one GPU, from one checkpoint, in bf16."""

from __future__ import annotations

import pytest

from tests.gpu import runs
from tests.gpu.runs import ENGINE, EXPERTS, SIMREG, Run

LOSS_BOUND, NORM_BOUND = 0.01, 0.05  # relative: sums in another order, in bf16
MIXTURE = (*ENGINE, *EXPERTS)
EXPERT_PARALLEL = ("--expert-model-parallel-size", "2")
LAYOUTS = {
    "dp2": (ENGINE, ()),
    "tp2-sp": (ENGINE, ("--tensor-model-parallel-size", "2", "--sequence-parallel")),
    "cp2": (ENGINE, ("--context-parallel-size", "2")),
    "pp2": (ENGINE, ("--pipeline-model-parallel-size", "2")),
    "ep2": (MIXTURE, EXPERT_PARALLEL),
    "ep2-schedule-plan": (MIXTURE, (*EXPERT_PARALLEL, "--overlap-moe-expert-parallel-comm")),
    "distributed-optimizer": (
        ENGINE, ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_computes_what_one_gpu_does(layout: str, observed, checkpoints) -> None:
    model, split = LAYOUTS[layout]
    reason = runs.why_not(Run(model, processes=2))
    if reason:
        pytest.skip(reason)
    start = checkpoints(Run((*model, "--simreg-lambda", "0")))
    one = observed(Run((*model, *SIMREG, *start)))
    two = observed(Run((*model, *SIMREG, *start, *split), processes=2))
    assert runs.largest_gap(one.losses, two.losses) < LOSS_BOUND
    assert runs.largest_gap(one.norms, two.norms) < NORM_BOUND
    assert two.simreg_losses() and min(two.simreg_losses()) > 0
