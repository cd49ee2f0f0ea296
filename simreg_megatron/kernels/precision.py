# SPDX-License-Identifier: Apache-2.0
"""Products of float32 numbers in float32, even if the process or its environment allows TensorFloat-32.

TensorFloat-32 rounds the factors to 10 bits: at tau 0.01 an error of 1e-3 in a cosine is a tenth of its exponential.
NVIDIA's containers switch it on for all of torch (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE), and many scripts do, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """Products inside are as exact as their type, and sums of half-precision ones are float32. Compiled code keeps the
    settings it was compiled under."""
    if torch.compiler.is_compiling():
        yield
        return
    settings, coarse = torch.backends.cuda.matmul, None
    exact: list[tuple[Any, str, Any]] = []
    try:
        if settings.allow_tf32:
            # "high" and "medium" both read as allow_tf32: which of them it was must be given back, too.
            coarse = torch.get_float32_matmul_precision()
            exact.append((settings, "allow_tf32", False))
    except RuntimeError:  # torch 2.9 has another name for it, and refuses the old one (TunableOp too) if they disagree
        exact.append((settings, "fp32_precision", "ieee"))
    on_cpu = getattr(torch.backends.mkldnn, "matmul", None)  # from torch 2.9 on it has a setting of its own
    if getattr(on_cpu, "fp32_precision", "ieee") not in ("ieee", "none"):
        exact.append((on_cpu, "fp32_precision", "ieee"))
    if getattr(settings, "allow_fp16_accumulation", False):  # torch refuses a float16 product into float32 with it
        exact.append((settings, "allow_fp16_accumulation", False))
    with contextlib.ExitStack() as restored:
        if coarse == "medium":
            restored.callback(torch.set_float32_matmul_precision, coarse)
        for holder, name, value in exact:
            restored.callback(setattr, holder, name, getattr(holder, name))
            setattr(holder, name, value)
        yield


def no_autocast(device_type: str) -> contextlib.AbstractContextManager:
    """Switch autocast off: cosines in bfloat16 have an error of 2e-3, a factor of 1.2 at tau 0.01."""
    has_autocast = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if has_autocast else contextlib.nullcontext()


def product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply two matrices, forward and backward in full float32; shapes as `torch.matmul` takes them."""
    return _Product.apply(left, right)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        # The backward may run under autocast, too: in loops that call loss.backward() inside of it.
        with full_float32(), no_autocast(left.device.type):
            return left @ right

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        left, right = ctx.saved_tensors
        of_left = product(grads[0], right.mT).sum_to_size(left.shape) if ctx.needs_input_grad[0] else None
        of_right = product(left.mT, grads[0]).sum_to_size(right.shape) if ctx.needs_input_grad[1] else None
        return of_left, of_right
