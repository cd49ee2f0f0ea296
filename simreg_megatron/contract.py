# SPDX-License-Identifier: Apache-2.0
"""Whether a training loop of your own trains with SimReg: to be run once, before the first real step.

    g = d loss          the gradient of a step without SimReg
    h = d (loss + lambda * SimReg)          with it

What the loop reports as its loss must be the same number both times, down to the bit, and h must differ from g.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from simreg_megatron.plugin import compat, foreign, installation

Gradients = list[Tensor]


class ContractError(RuntimeError):
    """This loop does not train with SimReg, or SimReg changes what it should not."""


class Found(NamedTuple):
    """What the check saw on this rank."""

    change: float
    """|h - g| / |g|, over all parameters of this rank."""
    changed: int
    """Parameters whose gradient differs."""
    parameters: int
    """Parameters with a gradient."""

    def __str__(self) -> str:
        return (
            f"SimReg changes the gradient by {self.change:.1%} of its norm, in {self.changed} of {self.parameters} "
            "parameters, and the loss not at all"
        )


def check(models: Any, forward_backward: Callable[[], Any]) -> Found:
    """Run one step's forward and backward passes three times, the second time with SimReg, and compare.

    Every rank calls it, after `install(config=...)` and before the first step. Random numbers start from the same state
    each time, and gradients of before are dropped, as are the three runs' own.

    Args:
        models: the model, or the list of model chunks on this rank, with or without Megatron's wrappers around them.
        forward_backward: runs both passes over the same data each time, without a step of the optimizer, and returns
            the loss that your log would show, or None if this rank knows none.

    Raises:
        ContractError: the loss differs, the gradients do not, or two runs without SimReg are not the same.
        NotImplementedError: SimReg does not reach these models.
    """
    foreign.begin_run(models)
    if not installation.regularizer().config.trains:
        raise ValueError("there is nothing to check while lambda is 0: install SimReg with the settings of the run")
    with foreign.paused():
        loss_without, without = _run(models, forward_backward)
    loss_with, with_simreg = _run(models, forward_backward)
    with foreign.paused():
        loss_again, again = _run(models, forward_backward)
    _clear(models)
    if not (_same(loss_without, loss_again) and all(map(torch.equal, without, again))):
        raise ContractError(
            "the same step without SimReg came out different twice: give forward_backward the same data each time, and "
            "make it repeatable (no asynchronous gradients left, torch.use_deterministic_algorithms(True) on a GPU)"
        )
    if not _same(loss_without, loss_with):
        raise ContractError(
            f"the loop reports {loss_with} with SimReg and {loss_without} without, on the same weights and data: "
            "SimReg must be in the gradient alone"
        )
    return _compared(without, with_simreg)


def _compared(without: Gradients, with_simreg: Gradients) -> Found:
    if len(without) != len(with_simreg):
        raise ContractError(
            f"{len(without)} parameters have a gradient without SimReg and {len(with_simreg)} with it: gradients must "
            "be there when forward_backward returns"
        )
    differences = [after.double() - before.double() for before, after in zip(without, with_simreg, strict=True)]
    changed = sum(bool(difference.any()) for difference in differences)
    if not changed:
        raise ContractError(
            "no gradient changes with SimReg: the loss that this loop trains on is not the one that the model returns "
            "for its labels"
        )
    change = _norm(differences) / (_norm(without) or math.nan)
    return Found(change, changed, len(without))


def _run(models: Any, forward_backward: Callable[[], Any]) -> tuple[Any, Gradients]:
    _clear(models)
    with foreign.random_numbers_of_before():
        loss = forward_backward()
    loss = loss.detach().clone() if isinstance(loss, Tensor) else loss
    return loss, [gradient.detach().clone() for gradient in _gradients(models)]


def _gradients(models: Any) -> Gradients:
    """Megatron's data parallelism adds them up in `main_grad`, and leaves `grad` empty."""
    found = []
    for model in compat.unwrapped(models):
        for parameter in model.parameters():
            gradient = getattr(parameter, "main_grad", None)
            gradient = parameter.grad if gradient is None else gradient
            found += [] if gradient is None else [gradient]
    return found


def _clear(models: Any) -> None:
    for model in models if isinstance(models, list) else [models]:
        if hasattr(model, "zero_grad_buffer"):
            model.zero_grad_buffer()
        model.zero_grad(set_to_none=True)


def _norm(tensors: Gradients) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    return bool(first == second)
