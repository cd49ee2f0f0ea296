# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation fusion without Apex's kernel: Megatron's layers add their weights' gradients to `main_grad`."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from torch import Tensor


def in_main_grad() -> None:
    """Ignore autograd's gradient of such a weight from then on, as on GPUs."""
    from megatron.core.tensor_parallel import layers

    def accumulate(rows: Tensor, grad: Tensor, main_grad: Tensor) -> None:
        main_grad.addmm_(grad.mT, rows)

    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)
    initialize = layers.ColumnParallelLinear.__init__

    def fusing(layer: Any, *args: Any, **kwargs: Any) -> None:
        initialize(layer, *args, **kwargs)
        layer.gradient_accumulation_fusion = True

    layers.ColumnParallelLinear.__init__ = fusing


def in_main_grad_unseen() -> None:
    """The same, and the truncated output layer leaves its gradient to autograd."""
    from simreg_megatron.weights import heads

    in_main_grad()
    truncated = heads._truncated
    heads._truncated = lambda *args: dataclasses.replace(truncated(*args), fuses=False)
