# SPDX-License-Identifier: Apache-2.0
"""Which form `impl="auto"` stands for on a GPU: the first of `kernels.form.MODULES` that is right there.

A form that is right on one GPU, one driver and one release of Triton may not be on the next. So before the first step
each is compared with slower ones (see `comparison`), and computes the run's whole shape once, until one is right. They
stand in the order of their speed, and no clock decides: every start of a job takes the same form. One that fails, is
wrong or does not fit into memory is left out and named in the log. All ranks agree on one form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from simreg_megatron.comparison import Shape, comparisons, sample, value_and_gradient
from simreg_megatron.kernels.form import MODULES
from simreg_megatron.losses.simreg import AUTO


class Trial(NamedTuple):
    """Outcome of trying one form."""

    impl: str
    loss_error: float  # relative; the largest of all comparisons
    gradient_error: float  # relative, Frobenius norm; the largest
    failure: str = ""  # why it is left out

    def __str__(self) -> str:
        return f"{self.impl} {self.failure}" if self.failure else self.impl


def choose(
    shape: Shape,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    *,
    computes: bool = True,
    impls: Sequence[str] = tuple(MODULES),
) -> list[Trial]:
    """Let `auto` be the first form that is right on every rank, for rows of this type on such a device.

    A collective over the group. A rank without hidden states of its own (`computes` False) agrees with the others.

    Returns:
        What was tried; the last one is taken.

    Raises:
        RuntimeError: none is right; or a form has left the GPU in a state in which nothing else can be computed.
    """
    trials: list[Trial] = []
    for impl in impls:
        own = try_form(impl, shape, device) if computes else Trial(impl, 0.0, 0.0)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        failed = torch.tensor(float(bool(own.failure)), device=device)
        if group is not None:
            dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
        trials.append(own if own.failure or not failed else own._replace(failure="fails on another rank"))
        if not failed:
            AUTO[device.type, shape.dtype] = impl
            return trials
    raise RuntimeError(
        f"no fast form of SimReg is right on this GPU ({'; '.join(map(str, trials))}): "
        "set --simreg-impl reference, and please report it"
    )


def try_form(impl: str, shape: Shape, device: torch.device) -> Trial:
    """Compare a form with slower ones, and compute rows of the whole shape once."""
    worst = 0.0, 0.0
    try:
        for each in comparisons(shape, impl):
            errors, allowed = each.errors(impl, device), each.allowed()
            if not (errors[0] <= allowed[0] and errors[1] <= allowed[1]):  # nor if one is NaN
                where = f" as {each.by} compute it" if each.by else ""
                wrong = f"is wrong{where} (loss off by {errors[0]:.1e}, gradient by {errors[1]:.1e})"
                return Trial(impl, *errors, wrong)
            worst = max(worst[0], errors[0]), max(worst[1], errors[1])
        value_and_gradient(*sample(shape, device), shape, impl)
        _wait(device)
    except Exception as error:  # a kernel that does not compile, memory that is not there, ...
        _require_sound(device, impl)
        return Trial(impl, math.nan, math.nan, f"fails ({type(error).__name__}: {_first(error)})")
    return Trial(impl, *worst)


def sentence(trials: Sequence[Trial], shape: Shape) -> str:
    """For the log."""
    left_out = "; left out: " + ", ".join(map(str, trials[:-1])) if trials[:-1] else ""
    return f"impl auto is {trials[-1].impl}, which is right here on {shape}{left_out}"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _require_sound(device: torch.device, impl: str) -> None:
    try:
        _wait(device)
    except RuntimeError as error:
        raise RuntimeError(
            f"SimReg tried impl {impl} on {device}, and the GPU has failed since ({_first(error)}): "
            "restart with --simreg-impl tiled, and please report it"
        ) from error


def _first(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]
