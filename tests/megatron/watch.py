# SPDX-License-Identifier: Apache-2.0
"""Things to count inside a run, each a function to call before it starts."""

from __future__ import annotations

from typing import Any


def evaluation() -> None:
    """Print every bit of each evaluation's loss, and how often SimReg was called in it and in training."""
    import megatron.training.training as training

    from simreg_megatron.plugin.regularizer import Regularizer

    add_to, evaluate, calls = Regularizer.add_to, training.evaluate, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return add_to(*args, **kwargs)

    def watched(*args: Any, **kwargs: Any) -> Any:
        before = len(calls)
        result = evaluate(*args, **kwargs)
        loss = result[0]["lm loss"].double().item()
        print(f"evaluated: {loss.hex()}, SimReg calls: {len(calls) - before}")
        print(f"SimReg calls in training: {before}")
        return result

    Regularizer.add_to = counted
    training.evaluate = watched
