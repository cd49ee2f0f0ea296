# SPDX-License-Identifier: Apache-2.0
"""SimReg's backward follows that of the loss and the output layer, which keep a GPU busy meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron import runs

SEQUENCE_PARALLEL = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
LOSS, LINEAR = "_VocabParallelCrossEntropyBackward", "LinearWithGradAccumulationAndAsyncCommunicationBackward"
SIMREG, NORM = "_RatiosOverRanksBackward", "RsqrtBackward0"


@pytest.mark.parametrize(
    ("model", "flags", "processes"),
    [("dense", (), 1), pytest.param("mtp", (), 1, marks=pytest.mark.slow), ("dense", SEQUENCE_PARALLEL, 2)],
)
def test_the_output_layer_comes_first(
    model: str, flags: tuple[str, ...], processes: int, data_flags: tuple[str, ...], tmp_path: Path
) -> None:
    words = (*data_flags, *runs.SIMREG, *flags, "--train-iters", "1")
    done = runs.attempt(tmp_path, words, model=model, processes=processes, patch="backward_order:printed")
    assert done.status == 0, done.output[-2000:]
    ranks = [line.split() for line in done.output.splitlines() if line.startswith("backward: ")]
    assert len(ranks) == processes
    for nodes in ranks:
        first = nodes[: nodes.index(SIMREG)]  # of one of two micro-batches
        assert first.count("_AddGradientBackward") == 1 and LINEAR in first[first.index(LOSS) :]
        assert (NORM in first) == (model == "mtp"), "the decoder's backward comes last"
