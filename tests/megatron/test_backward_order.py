# SPDX-License-Identifier: Apache-2.0
"""SimReg's backward lies between those of the loss and of the output layer, which keep a GPU busy meanwhile."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron import runs

SEQUENCE_PARALLEL = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
LOSS, LINEAR = "_VocabParallelCrossEntropyBackward", "LinearWithGradAccumulationAndAsyncCommunicationBackward"
SIMREG, NORM = "_SimRegBackward", "RsqrtBackward0"


@pytest.mark.parametrize(("flags", "processes"), [((), 1), (SEQUENCE_PARALLEL, 2)])
def test_the_loss_comes_first_and_the_output_layer_last(flags, processes: int, data_flags, tmp_path: Path) -> None:
    words = (*data_flags, *runs.SIMREG, *flags, "--train-iters", "1")
    done = runs.attempt(tmp_path, words, processes=processes, patch="test_backward_order:printed")
    assert done.status == 0, done.output[-2000:]
    ranks = [line.split() for line in done.output.splitlines() if line.startswith("backward: ")]
    assert len(ranks) == processes
    for nodes in ranks:
        first, later = nodes[: nodes.index(SIMREG)], nodes[nodes.index(SIMREG) :]  # of one of two micro-batches
        assert first.count("_AddGradientBackward") == first.count(LOSS) == 1
        assert LINEAR not in first and NORM not in first
        assert later.index(LINEAR) < later.index(NORM), "then the output layer's, then the decoder's"


def printed() -> None:
    """Print the names of the autograd nodes of each training step, in the order in which they run."""
    from megatron.training import training

    train_step, node = training.train_step, "autograd::engine::evaluate_function: "

    def profiled(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            result = train_step(*args, **kwargs)
        events = sorted(profile.events(), key=lambda event: event.time_range.start)
        nodes = [event.name.removeprefix(node) for event in events if event.name.startswith(node)]
        # In one write, on a line of its own: another rank may be within a line of the log that they share.
        os.write(sys.stdout.fileno(), f"\nbackward: {' '.join(nodes)}\n".encode())
        return result

    training.train_step = profiled
