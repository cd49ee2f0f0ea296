# SPDX-License-Identifier: Apache-2.0
"""One run of launch/pretrain_llama.sh for the benchmarks, started by `benchmarks.step_pairs`.

On a GPU, Megatron's local attention (where Transformer Engine is missing) is computed by torch's fused kernels. With
SIMREG_STEP_TIMES every other pair of steps is plain Megatron's (see `alternating_run`); with SIMREG_STEP_PROFILE the
last ones are profiled, and have no times.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.alternating_run import Alternating  # noqa: E402  (the root is on the path first)
from launch.launcher import main  # noqa: E402
from simreg_megatron.cpu import backend  # noqa: E402
from simreg_megatron.plugin import hooks, installation  # noqa: E402

TIMES, PROFILE = "SIMREG_STEP_TIMES", "SIMREG_STEP_PROFILE"  # files to write


def torch_attention(
    attention: Any, query: Tensor, key: Tensor, value: Tensor, mask: object = None, *_: object, **__: object
) -> Tensor:
    """Causal attention [S, B, H * D] of query, key and value [S, B, heads, D], in place of DotProductAttention.forward.

    Megatron's own keeps every score: 24 layers of 350M at micro-batch 8 have 13 billion, at six bytes each.
    """
    q, k, v = (part.permute(1, 2, 0, 3) for part in (query, key, value))
    grouped = query.shape[2] != key.shape[2]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=attention.softmax_scale, enable_gqa=grouped)
    return out.permute(2, 0, 1, 3).flatten(2)


def _install_and_change(install: Callable[..., None], times: Any) -> Callable[..., None]:
    def installed(*args: Any, **kwargs: Any) -> None:
        install(*args, **kwargs)
        from megatron.core.transformer.dot_product_attention import DotProductAttention
        from megatron.training import training

        if not backend.is_active():
            DotProductAttention.forward = torch_attention
        if times is not None:
            profile = Path(os.environ[PROFILE]) if PROFILE in os.environ else None
            training.train_step = Alternating(installation.current()._originals, times, profile)

    return installed


if __name__ == "__main__":
    with contextlib.ExitStack() as files:
        path = os.environ.get(TIMES)
        times = files.enter_context(open(path, "w", encoding="utf-8", newline="", buffering=1)) if path else None
        hooks.install = _install_and_change(hooks.install, times)
        main("llama")
