# SPDX-License-Identifier: Apache-2.0
"""Full-iteration CUDA graphs: Megatron captures all micro-batches of one step, and replays them in the steps after it.

Python runs in the capture alone. So what changes from step to step must lie in tensors that were there before it: the
factor of lambda (strength.py) and the sums of the log (metrics.py) do. What the host decides anew for each step cannot:
the geometry of log steps is not measured, and settings that live from such decisions are refused.
"""

from __future__ import annotations

import re
from typing import Any

from simreg_megatron.config import SimRegConfig

FLAG = "--cuda-graph-impl full_iteration"
_INSTEAD = "capture layers only (--cuda-graph-impl local or transformer_engine)"


def is_asked_for(args: Any) -> bool:
    """As an implementation, or in some releases as the scope of another one."""
    asked = f"{getattr(args, 'cuda_graph_impl', '')} {getattr(args, 'cuda_graph_scope', '')}"
    return re.search(r"full_iteration(?!_inference)", asked) is not None


def refuse(args: Any, config: SimRegConfig) -> None:
    """Refuse what the same computation in every step cannot be.

    Raises:
        ValueError, NotImplementedError: the sentence names it and the way out.
    """
    if not config.trains:
        raise ValueError(f"SimReg only measures here, which {FLAG} leaves no room for: {_INSTEAD}, or drop SimReg")
    if config.log_interval is not None:
        raise ValueError(
            f"--simreg-log-interval has no effect with {FLAG}, as no geometry is measured then: drop it, or {_INSTEAD}"
        )
    if config.every > 1:
        raise NotImplementedError(
            f"--simreg-every {config.every} leaves SimReg out of most steps, and {FLAG} computes the same in each: "
            f"drop it, or {_INSTEAD}"
        )
    for part in config.parts:
        if part.record.draws:
            raise NotImplementedError(
                f"SimReg objective {part.objective} draws anew in each step, and {FLAG} would repeat the first draw: "
                f"{_INSTEAD}, or choose another objective"
            )
    if getattr(args, "cuda_graph_warmup_steps", 1) < 1:
        raise ValueError(
            f"SimReg makes what it keeps from step to step in the first one, which {FLAG} must not capture: "
            "set --cuda-graph-warmup-steps to 1 or more"
        )
