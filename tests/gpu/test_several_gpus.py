# SPDX-License-Identifier: Apache-2.0
"""On two GPUs or four with Transformer Engine: every layout agrees with one GPU, from one checkpoint, in bf16."""

from dataclasses import dataclass

import pytest

from tests.gpu import runs
from tests.gpu.runs import ADAGC, ENGINE, EXPERTS, LEARNABLE, SIMREG, Run

LOSS_BOUND, NORM_BOUND = 0.01, 0.05  # relative: sums in another order, in bf16


@dataclass(frozen=True)
class Layout:
    split: tuple[str, ...]  # flags of the spread job alone
    model: tuple[str, ...] = ENGINE  # which the checkpoint has, too
    setting: tuple[str, ...] = ()  # which the job on one GPU has as well
    processes: int = 2


TP2, SP = ("--tensor-model-parallel-size", "2"), ("--sequence-parallel",)
CP2, PP2 = ("--context-parallel-size", "2"), ("--pipeline-model-parallel-size", "2")
EP2 = ("--expert-model-parallel-size", "2")
MIXTURE, DEEP = (*ENGINE, *EXPERTS), (*ENGINE, "--num-layers", "4")
DISTRIBUTED = ("--use-distributed-optimizer",)
OVERLAPPED = (*DISTRIBUTED, "--overlap-grad-reduce", "--overlap-param-gather")
WHOLE = ("--simreg-chunk-size", "0")
LAYOUTS = {
    "dp2": Layout(()),
    "tp2": Layout(TP2),
    "tp2-sp": Layout((*TP2, *SP)),
    "cp2": Layout(CP2),
    "pp2": Layout(PP2),
    "pp2-vpp2": Layout((*PP2, "--num-virtual-stages-per-pipeline-rank", "2"), DEEP),
    "tp2-cp2": Layout((*TP2, *CP2), processes=4),
    "tp2-sp-cp2": Layout((*TP2, *SP, *CP2), processes=4),
    "tp2-sp-whole": Layout((*TP2, *SP), setting=WHOLE),
    "cp2-whole": Layout(CP2, setting=WHOLE),
    "tp2-sp-cp2-whole": Layout((*TP2, *SP, *CP2), setting=WHOLE, processes=4),
    "ep2": Layout(EP2, MIXTURE),
    "ep2-schedule-plan": Layout((*EP2, "--overlap-moe-expert-parallel-comm"), MIXTURE),
    "distributed-optimizer": Layout(OVERLAPPED),
    "learnable": Layout(OVERLAPPED, setting=LEARNABLE),
    "learnable-tp2": Layout(TP2, setting=LEARNABLE),
    "adagc-distributed": Layout(DISTRIBUTED, setting=ADAGC),
    "adagc-tp2-sp": Layout((*TP2, *SP), setting=ADAGC),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layout_computes_what_one_gpu_does(name: str, observed, checkpoints) -> None:
    layout = LAYOUTS[name]
    reason = runs.why_not(Run(layout.model, processes=layout.processes))
    if reason:
        pytest.skip(reason)
    start = checkpoints(Run((*layout.model, "--simreg-lambda", "0")))
    alone = Run((*layout.model, *SIMREG, *layout.setting, *start))
    one, several = observed(alone), observed(alone.on_more(layout.processes, *layout.split))
    assert runs.largest_gap(one.losses, several.losses) < LOSS_BOUND
    assert runs.largest_gap(one.norms, several.norms) < NORM_BOUND
    assert several.simreg_losses() and min(several.simreg_losses()) > 0
    assert [line.keys() for line in several.logged] == [line.keys() for line in one.logged]
    if layout.setting == LEARNABLE:
        assert_trained_alike(one, several)


def assert_trained_alike(one: runs.Observed, several: runs.Observed) -> None:
    """Both gammas begin at a half, and move; one that a rank did not get from the others would stay."""
    for name in ("simreg gamma query", "simreg gamma key"):
        (first, *_, last), others = ([line[name] for line in run.logged] for run in (one, several))
        assert first == 0.5 and abs(last - 0.5) > 3e-4
        assert abs(others[-1] - last) < 0.1 * abs(last - 0.5)


def test_a_forgotten_rank_is_told(observed, checkpoints) -> None:
    """Chunks that end where a rank's block does are another function: outside of what the layouts are held to."""
    reason = runs.why_not(Run(ENGINE, processes=2))
    if reason:
        pytest.skip(reason)
    start = checkpoints(Run((*ENGINE, "--simreg-lambda", "0")))
    alone = Run((*ENGINE, *SIMREG, *WHOLE, *start))
    one, local = observed(alone), observed(alone.on_more(2, *TP2, *SP, "--simreg-scope", "local"))
    assert runs.largest_gap(one.norms, local.norms) > 2 * 0.05
