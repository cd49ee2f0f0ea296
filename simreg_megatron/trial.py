# SPDX-License-Identifier: Apache-2.0
"""Choose the form behind `impl="auto"` on a GPU: triton where it is right, else tiled.

A kernel that is right on one GPU, one driver and one release of Triton may not be on the next. So before the first step
it is compared with a slower form (see `comparison`), and computes the run's whole shape once. One that fails, is wrong
or does not fit into memory is left out and named in the log. All ranks agree on one form, and no clock decides: every
start of a job takes the same one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from simreg_megatron.comparison import Shape, errors, sample, value_and_gradient
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
    """Compare a form with a slower one, and compute rows of the whole shape once."""
    worst = 0.0, 0.0
    try:
        for how, found, may in errors(shape, impl, device):
            if not (found[0] <= may[0] and found[1] <= may[1]):  # nor if one is NaN
                wrong = f"is wrong{how} (loss off by {found[0]:.1e}, gradient by {found[1]:.1e})"
                return Trial(impl, *found, wrong)
            worst = max(worst[0], found[0]), max(worst[1], found[1])
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
