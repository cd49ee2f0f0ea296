# SPDX-License-Identifier: Apache-2.0
"""fp16 steps that overflow are as if they had not been: weights, AdaGC's averages, trained scalars and the log.

The reference leaves those steps out (--iterations-to-skip) and gives the others the loss scale that they had. All must
be equal bit for bit.
"""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron import runs
from tests.megatron.parity.run import Bench
from tests.megatron.test_adagc import ADAGC, SIMREG, Ran, start

STEPS = 14
OBJECTIVE = (*SIMREG, "--simreg-similarity", "learnable", "--simreg-warmup-iters", str(STEPS))
OBJECTIVE += ("--dist-ckpt-strictness", "log_all")
FIRST_SCALE = 2**20
RISING = ("--initial-loss-scale", str(FIRST_SCALE), "--hysteresis", "1", "--loss-scale-window", "2")


class Trained(Ran):
    def __init__(self, out: Path) -> None:
        super().__init__(out)
        self.weights: list[dict[str, torch.Tensor]] = torch.load(out / "weights0.pt", weights_only=True)
        self.skipped = [math.isnan(norm) for norm in self.recorded.norms]
        after = [float(scale) for scale in re.findall(r"loss scale: (\S+)", self.log)]
        self.scales = [float(FIRST_SCALE), *after][:-1]  # of each step; the log has the value after it


def train(out: Path, flags: tuple[str, ...], processes: int, patch: str = "adagc_and_weights") -> Trained:
    runs.train(out, flags, processes=processes, patch=f"watch:{patch}")
    return Trained(out)


def is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize(
    ("layout", "processes"),
    [
        ("", 1),
        pytest.param("--use-distributed-optimizer", 2, marks=pytest.mark.slow),
        pytest.param("--tensor-model-parallel-size 2 --sequence-parallel", 2, marks=pytest.mark.slow),
    ],
    ids=["1 process", "dp2 distributed", "tp2-sp"],
)
def test_a_step_that_overflows_is_left_out(layout: str, processes: int, bench: Bench, tmp_path: Path) -> None:
    flags = (*start(bench, "dense", STEPS), *OBJECTIVE, *ADAGC, "--fp16", *layout.split())
    got = train(tmp_path / "overflows", (*flags, *RISING), processes)
    skipped = [step for step, is_skipped in enumerate(got.skipped) if is_skipped]
    trained = [step for step, is_skipped in enumerate(got.skipped) if not is_skipped]
    assert 0 in skipped and any(step > trained[1] for step in skipped) and len(trained) > 4
    for step in range(1, STEPS):
        assert is_same(got.weights[step - 1], got.weights[step]) == (step in skipped), step

    place = tmp_path / "left-out"
    place.mkdir()
    torch.save([got.scales[step] for step in trained], place / "scales.pt")
    # Where the scale is constant Megatron also looks at norms, whose squares may overflow when no gradient does.
    left_out = ["--loss-scale", "1", "--no-check-for-nan-in-loss-and-grad", "--iterations-to-skip"]
    left_out += [str(step + 1) for step in skipped]
    expected = train(place, (*flags, *left_out), processes, "at_given_scales")
    assert runs.same_bits(expected.recorded, got.recorded)
    assert expected.states == got.states and len(got.states) == len(trained)
    assert expected.recorded.losses == [got.recorded.losses[step] for step in trained]
    assert expected.recorded.norms == [got.recorded.norms[step] for step in trained]
    query = [weights["simreg_similarity.query"].item() for weights in got.weights]
    assert len(set(query)) == len(trained) + 1, "the scalars are trained"

    # Megatron's first line begins no new interval, so the reference's second is of two steps.
    lines = [got.recorded.logged[step] for step in trained]
    assert expected.recorded.logged[:1] + expected.recorded.logged[2:] == lines[:1] + lines[2:]
    assert all(math.isfinite(value) for line in got.recorded.logged for value in line.values()), "of skipped steps, too"
