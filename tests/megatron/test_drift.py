# SPDX-License-Identifier: Apache-2.0
"""With SimReg on, replicas never drift apart, a run can be repeated bit for bit, and stopped and gone on with."""

from pathlib import Path

import pytest

from tests.megatron import runs
from tests.megatron.runs import SIMREG, Recorded

ON = (*SIMREG, "--simreg-chunk-size", "24", "--lr-decay-style", "constant")
ONE: tuple[str, ...] = ()
TP2 = ("--tensor-model-parallel-size", "2")
TP2_SP = (*TP2, "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", "2")
EVERYTHING = (  # that has a state, or goes by the number of the step
    *("--simreg-objective", "simreg:10,sigreg:0.3,placebo:1,sigmoid:0.1", "--simreg-similarity", "learnable"),
    *("--simreg-temperature", "0.5", "--simreg-chunk-size", "24", "--simreg-warmup-iters", "2"),
    *("--simreg-lambda-schedule", "cosine:0.4", "--simreg-off-after", "0.75", "--lr-decay-style", "constant"),
    *("--adagc", "--adagc-lambda-rel", "0.9", "--adagc-beta", "0.8", "--adagc-warmup-iters", "2"),
)
STOP, END = 3, 6


@pytest.mark.slow
@pytest.mark.parametrize("steps", [6, 50])
def test_replicas_stay_equal(steps: int, data_flags: tuple[str, ...], tmp_path: Path) -> None:
    """Without sequence parallelism each tensor rank holds every hidden state, and computes only its own anchors."""
    flags = (*data_flags, *ON, *TP2, "--train-iters", str(steps), "--eval-iters", "0")
    first, again = (runs.train(tmp_path / name, flags, processes=2) for name in ("first", "again"))
    assert len(first.losses) == steps and first.losses[-1] < first.losses[0], "the run must train"
    # Reading them has compared the replicas, bit for bit.
    assert (first.losses, first.norms) == (again.losses, again.norms) and runs.same_bits(first, again)


MOVES = [
    pytest.param(ONE, ONE, id="one", marks=pytest.mark.slow),
    pytest.param(TP2_SP, TP2_SP, id="tp2-sp"),
    pytest.param(ONE, TP2, id="one-to-tp2", marks=pytest.mark.slow),
    pytest.param(ONE, PP2, id="one-to-pp2"),
]


@pytest.mark.parametrize(("before", "after"), MOVES)
def test_going_on_is_never_having_stopped(before, after, data_flags: tuple[str, ...], tmp_path: Path) -> None:
    on = EVERYTHING if before == after else ON
    place = ("--save", str(tmp_path / "saved"), "--save-interval", str(STOP), "--exit-interval", str(STOP))
    # The run that stops is given all its steps, and ends early: its data order is then that of the whole.
    whole = _train(tmp_path / "whole", (*data_flags, *on, *before))
    _train(tmp_path / "stopped", (*data_flags, *on, *before, *place))
    gone_on = _train(tmp_path / "gone-on", (*data_flags, *on, *after, "--load", str(tmp_path / "saved")))
    assert len(gone_on.losses) == END - STOP
    if before == after:
        assert gone_on.losses == whole.losses[STOP:] and runs.same_bits(gone_on, whole)
        lambdas = [line["placebo lambda"] for line in whole.logged]
        assert [line["placebo lambda"] for line in gone_on.logged] == lambdas[STOP:]
        assert len(set(lambdas[:4])) == 4 and lambdas[4:] == [0, 0], lambdas
        assert all(whole.params[name].item() for name in ("simreg_similarity.query", "simreg_sigmoid.log_t"))
        return
    assert gone_on.losses == pytest.approx(whole.losses[STOP:], rel=1e-6)
    assert gone_on.norms == pytest.approx(whole.norms[STOP:], rel=1e-5)
    # Adam turns the rounding of a gradient near zero into a whole step of that element: compare in norm.
    gaps = {name: gone_on.params[name] - parameter for name, parameter in whole.params.items()}
    assert runs.total_norm(gaps) <= 1e-5 * runs.total_norm(whole.params)


def _train(out: Path, flags: tuple[str, ...]) -> Recorded:
    processes = 2 if {TP2[0], PP2[0]} & set(flags) else 1
    return runs.train(out, (*flags, "--train-iters", str(END), "--eval-iters", "0"), processes=processes)
