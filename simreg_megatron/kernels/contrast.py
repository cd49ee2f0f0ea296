# SPDX-License-Identifier: Apache-2.0
"""SimReg as a ratio of two sums that never needs all pairs at once: the maths that every fast form shares.

With P_ij = exp((cos(e_i, e_j) - 1) / tau) and the token itself among its positives, S_pos lies in [1, k]: the shift by
1 / tau needs no maximum, and one exponential serves row i and row j. The term is log1p(S_neg / S_pos), never a
difference of two large logarithms.

The gradient is one symmetric matrix times the unit rows: with u = S_neg / S_pos, and g the gradient of the term,

    a_i = g_i / ((1 + u_i) tau S_pos_i),  b_i = a_i u_i,
    H_ij = P_ij (a_i + a_j) for other labels, -P_ij (b_i + b_j) for equal ones,

and dL/de_i = (h_i - <h_i, e^_i> e^_i) / |e_i| with h = H e^. Between forward and backward four numbers a token stay in
addition to the embeddings, and P itself where it is small; else P is computed again.

Shapes: b sequences of c chunks of k tokens with d features.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from simreg_megatron.kernels.form import Form, Kept, Tokens
from simreg_megatron.kernels.torch import TorchForm


@functools.cache
def form_named(impl: str) -> Form:
    """Return a fast form.

    Raises:
        ValueError: it needs a Triton that is not here.
    """
    if impl == "tiled":
        return TorchForm()
    try:
        from simreg_megatron.kernels.triton import TritonForm
    except ModuleNotFoundError as error:
        raise ValueError(f"impl {impl} needs {error.name}, which is not installed: use tiled") from error
    return TritonForm()


def contrast_terms(tokens: Tokens, *, temperature: float, impl: str = "tiled") -> Tensor:
    """Compute log(1 + u_i) of every token [b, c, k], u_i = sum_{j in N_i} P_ij / sum_{j in P_i} P_ij.

    Args:
        tokens: float16, bfloat16, float32 or float64 rows; half precision is summed in float32, and never normalised
            in its own type.
        temperature: tau, above 0.
        impl: one of `form.FORMS`.

    Returns:
        float32 (float64 for float64). 0 for a token without negatives and for one that is not usable.
    """
    compute = _ContrastTerms.apply
    if torch.compiler.is_compiling():
        compute = torch.compiler.disable(compute)  # its tiles stay out of the graph
    return compute(*tokens, temperature, impl)


class _ContrastTerms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, labels: Tensor, usable: Tensor, documents: Tensor | None, temperature: float, impl: str
    ) -> Tensor:
        tokens, anchors = Tokens(rows, labels, usable, documents), (0, rows.shape[2])
        terms, slopes, kept = form_named(impl).measure(tokens, anchors, temperature, keep=ctx.needs_input_grad[0])
        ctx.save_for_backward(rows, slopes, *kept)
        ctx.options, ctx.is_spent = (temperature, impl), False
        return terms

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, slopes, *saved = ctx.saved_tensors
        temperature, impl = ctx.options
        form, (kept,) = form_named(impl), without_spent_pairs(ctx, [Kept(*saved)])
        grad = torch.empty_like(rows, memory_format=torch.contiguous_format)
        form.pull_back(rows, kept, grads[0] * slopes, (0, rows.shape[2]), temperature, grad)
        return grad, None, None, None, None, None


def without_spent_pairs(ctx: Any, kept: list[Kept]) -> list[Kept]:
    """Drop the exponentials in a second backward (`retain_graph`): the first one may have written over them."""
    if ctx.is_spent:
        kept = [each._replace(pairs=each.pairs.new_empty(0)) for each in kept]
    ctx.is_spent = True
    return kept
