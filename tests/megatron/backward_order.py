# SPDX-License-Identifier: Apache-2.0
"""Print the names of the autograd nodes of each training step, in the order in which they run."""

from typing import Any

import torch

_NODE = "autograd::engine::evaluate_function: "


def printed() -> None:
    """Wrap Megatron's `train_step`."""
    from megatron.training import training

    train_step = training.train_step

    def profiled(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            result = train_step(*args, **kwargs)
        events = sorted(profile.events(), key=lambda event: event.time_range.start)
        nodes = [event.name.removeprefix(_NODE) for event in events if event.name.startswith(_NODE)]
        print("backward:", *nodes, flush=True)
        return result

    training.train_step = profiled
