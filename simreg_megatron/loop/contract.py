# SPDX-License-Identifier: Apache-2.0
"""Test whether your own training loop trains with SimReg; run it once, before the first real step.

    g = d loss          the gradient of a step without SimReg
    h = d (loss + lambda * SimReg)          with it

The loss that the loop reports must be the same number in both cases, bit for bit, and h must differ from g.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from simreg_megatron.notices import refuse
from simreg_megatron.parallel import learnable
from simreg_megatron.plugin import compat, installation
from simreg_megatron.plugin.loop import begin_run


class ContractError(RuntimeError):
    """The loop does not train with SimReg, or SimReg changes what it should not."""


class Found(NamedTuple):
    """Result of the check on this rank."""

    change: float  # |h - g| / |g|, over all parameters of this rank
    changed: int  # parameters whose gradient differs
    parameters: int  # parameters with a gradient

    def __str__(self) -> str:
        return (
            f"SimReg changes the gradient by {self.change:.1%} of its norm, in {self.changed} of {self.parameters} "
            "parameters, and the loss not at all"
        )


def check(models: Any, forward_backward: Callable[[], Any]) -> Found:
    """Run one step's forward and backward passes three times, the second time with SimReg, and compare.

    Call it on every rank, after `install(config=...)` and before the first step. It clears all gradients.

    Args:
        models: the model, or the list of model chunks on this rank, with or without Megatron's wrappers around them.
        forward_backward: runs both passes without an optimizer step and returns the loss that your log would show,
            also in lists and dictionaries as Megatron's schedules do, or None on a rank without a loss. It must use the
            same data each time; the random state is reset for it.

    Raises:
        ContractError: SimReg changes the reported loss, or no gradient; or two runs without SimReg differ.
        NotImplementedError: SimReg does not support these models.
        ValueError: lambda is 0, so there is nothing to compare.
    """
    begin_run(models)
    regularizer = installation.regularizer()
    config = regularizer.config
    if not config.trains:
        raise ValueError("there is nothing to check while lambda is 0: install SimReg with the settings of the run")
    # Look at a step with the whole of lambda.
    regularizer.strength.set_iteration(config.every * (config.start_iter + config.warmup_iters), num_iterations=10**12)
    try:
        return _check(models, forward_backward)
    finally:
        installation.current().paused = False
        _clear(models)
        begin_run(models)  # nothing of these steps is logged, or taken for one that the loop counted


def _check(models: Any, forward_backward: Callable[[], Any]) -> Found:
    state = installation.current()
    state.paused = True
    loss_without, gradients = _run(models, forward_backward)
    without = [gradient.clone() for gradient in gradients]  # the only copy: the others are compared where they lie
    state.paused = False
    loss_with, gradients = _run(models, forward_backward)
    num_with = len(gradients)
    pairs = zip(gradients, without, strict=True) if num_with == len(without) else ()
    moved = [float((new.float() - old.float()).norm()) for new, old in pairs]
    state.paused = True
    loss_again, gradients = _run(models, forward_backward)
    repeats = len(gradients) == len(without) and all(map(torch.equal, without, gradients))
    numbers = (part for part in tree_leaves(loss_without) if isinstance(part, Tensor | int | float))
    refuse(
        (not all(bool(torch.as_tensor(number).isfinite().all()) for number in numbers),
         f"the loop reports {loss_without} without SimReg, so nothing can be compared: fix that first"),
        (not (repeats and _same(loss_without, loss_again)),
         "two runs of the same step without SimReg gave different results: forward_backward must use the same data "
         "each time, finish all gradients, and be deterministic (torch.use_deterministic_algorithms(True) on a GPU)"),
        (not _same(loss_without, loss_with),
         f"the loop reports {loss_with} with SimReg and {loss_without} without, on the same weights and data: "
         "report the loss that the model returns, which SimReg leaves unchanged"),
        (num_with != len(without),
         f"{len(without)} parameters have a gradient without SimReg and {num_with} with it: "
         "forward_backward must not return before all gradients are computed"),
        (not all(map(math.isfinite, moved)), "with SimReg a gradient is not finite: look at the hidden states"),
        (not any(moved) and state.regularizer().has_gradient_arrived,
         "no gradient changes with SimReg: its own is too small to change a digit; take real text"),
        (not any(moved),
         "no gradient changes with SimReg: this loop does not train on the loss that the model returns; keep the model "
         "in training mode, pass labels to it, and call backward on the loss that it returns"),
        error=ContractError,
    )  # fmt: skip
    size = math.hypot(*(float(gradient.float().norm()) for gradient in without))
    return Found(math.hypot(*moved) / (size or math.nan), sum(map(bool, moved)), len(without))


@contextmanager
def _repeated(models: Any) -> Iterator[None]:
    """Restore the random state and the models' buffers (biases of experts, say), so that a step can be repeated."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    of_megatron = dict(get_cuda_rng_tracker().get_states())
    buffers = [(buffer, buffer.clone()) for model in compat.unwrapped(models) for buffer in model.buffers()]
    try:
        with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
            yield
    finally:
        get_cuda_rng_tracker().set_states(of_megatron)
        for buffer, before in buffers:
            buffer.copy_(before)


def _run(models: Any, forward_backward: Callable[[], Any]) -> tuple[Any, list[Tensor]]:
    """Run one step's passes; return a copy of the loss that the loop reports, and all gradients."""
    _clear(models)
    with _repeated(models):
        loss = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), forward_backward())
    named = (pair for model in compat.unwrapped(models) for pair in model.named_parameters())
    parameters = [parameter for name, parameter in named if f".{learnable.PREFIX}" not in f".{name}"]  # SimReg's own
    # Megatron's data parallelism has the gradients in `main_grad`, and leaves `grad` empty.
    both = ((getattr(parameter, "main_grad", None), parameter.grad) for parameter in parameters)
    grads = (grad if main is None else main for main, grad in both)
    return loss, [grad.detach() for grad in grads if grad is not None]


def _clear(models: Any) -> None:
    for model in compat.as_list(models):
        if hasattr(model, "zero_grad_buffer"):
            model.zero_grad_buffer()
        model.zero_grad(set_to_none=True)


def _same(first: Any, second: Any) -> bool:
    (one, form), (other, other_form) = tree_flatten(first), tree_flatten(second)
    return form == other_form and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)
        for a, b in zip(one, other, strict=True)
    )
