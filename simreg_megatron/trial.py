# SPDX-License-Identifier: Apache-2.0
"""Which form `impl="auto"` stands for on a GPU: the fastest of those that are right there, on rows of the run's shape.

A form that is right on one GPU, one driver and one release of Triton may not be on the next, and which is fastest
depends on the shape. So both are found out where the run is, once, before its first step:

* right: see `comparison`;
* fast: forward and backward of the whole shape, by the device's clock.

A form that fails, or does not fit into memory, is excluded and named in the log. All ranks agree on one form.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from simreg_megatron.comparison import Shape, comparisons, sample, value_and_gradient
from simreg_megatron.kernels.form import MODULES
from simreg_megatron.losses.simreg import AUTO

_ROUNDS = 5
_HEAD_START = 200_000_000  # cycles of the device, about 100 ms, in which the host queues all rounds


class Trial(NamedTuple):
    """What became of one form."""

    impl: str
    loss_error: float  # relative; the largest of all comparisons
    gradient_error: float  # relative, Frobenius norm; the largest
    seconds: float  # of a micro-batch, forward and backward; infinite where it was not timed
    failure: str = ""  # why it is left out

    def __str__(self) -> str:
        return f"{self.impl} {self.failure}" if self.failure else f"{self.impl} {1e3 * self.seconds:.2f} ms"


def try_forms(shape: Shape, device: torch.device, impls: Sequence[str] = tuple(MODULES)) -> list[Trial]:
    """Each of the forms on rows of this shape.

    Raises:
        RuntimeError: a form has left the GPU in a state in which nothing else can be computed.
    """
    found = []
    for impl in impls:
        try:
            found.append(_trial(impl, shape, device))
        except Exception as error:  # a kernel that does not compile, memory that is not there, ...
            _require_sound(device, impl)
            found.append(Trial(impl, math.nan, math.nan, math.inf, f"fails ({type(error).__name__}: {_first(error)})"))
        _give_back_memory(device)
    return found


def agree(trials: Sequence[Trial], group: dist.ProcessGroup | None, device: torch.device) -> list[Trial]:
    """The same trials on every rank of the group: a form that fails on one is left out by all, the slowest rank counts.

    A collective; a rank that tries none passes `idle()`.
    """
    numbers = torch.tensor(
        [[float(bool(trial.failure)), trial.seconds if not trial.failure else 0.0] for trial in trials],
        dtype=torch.float64,
        device=device,
    )
    if group is not None:
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
    agreed = []
    for trial, (failed, seconds) in zip(trials, numbers.tolist(), strict=True):
        failure = (trial.failure or "fails on another rank") if failed else ""
        agreed.append(trial._replace(failure=failure, seconds=math.inf if failed else seconds))
    return agreed


def idle(impls: Sequence[str] = tuple(MODULES)) -> list[Trial]:
    """For a rank without hidden states of its own: it agrees with whatever the others find."""
    return [Trial(impl, 0.0, 0.0, 0.0) for impl in impls]


def fastest(trials: Sequence[Trial]) -> str:
    """The form to take.

    Raises:
        RuntimeError: none is right.
    """
    right = [trial for trial in trials if not trial.failure]
    if not right:
        raise RuntimeError(
            f"no fast form of SimReg is right on this GPU ({'; '.join(map(str, trials))}): "
            "set --simreg-impl reference, and please report it"
        )
    return min(right, key=lambda trial: trial.seconds).impl


def same_every_time(trials: Sequence[Trial]) -> str:
    """The form to take where runs must repeat bit for bit: the first that is right, as clocks never agree twice."""
    return next((trial.impl for trial in trials if not trial.failure), "") or fastest(trials)


def take(impl: str, shape: Shape, device: torch.device) -> None:
    """From now on `auto` is this form, for rows of this type on such a device."""
    AUTO[device.type, shape.dtype] = impl


def sentence(trials: Sequence[Trial], shape: Shape, taken: str = "") -> str:
    """For the log; `taken` is the fastest by default."""
    taken = taken or fastest(trials)
    others = ", ".join(str(trial) for trial in trials if trial.impl != taken)
    (own,) = (trial for trial in trials if trial.impl == taken)
    return f"impl auto is {own} a micro-batch of {shape}" + (f"; tried as well: {others}" if others else "")


def _trial(impl: str, shape: Shape, device: torch.device) -> Trial:
    worst = 0.0, 0.0
    for each in comparisons(shape, impl):
        errors, allowed = each.errors(impl, device), each.allowed()
        if not (errors[0] <= allowed[0] and errors[1] <= allowed[1]):  # nor if one is NaN
            where = f" as {each.by} compute it" if each.by else ""
            wrong = f"is wrong{where} (loss off by {errors[0]:.1e}, gradient by {errors[1]:.1e})"
            return Trial(impl, *errors, math.inf, wrong)
        worst = max(worst[0], errors[0]), max(worst[1], errors[1])
    rows, labels, valid = sample(shape, device)
    seconds = _seconds(lambda: value_and_gradient(rows, labels, valid, shape, impl), device)
    return Trial(impl, *worst, seconds)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Time one call: on a GPU the device's mean of some queued calls, on a CPU the least of some.

    In a training step the host prepares SimReg while the GPU is busy with the layers, so its time does not count.
    """
    run()
    _wait(device)
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_HEAD_START)
        start.record()
        for _ in range(_ROUNDS):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / _ROUNDS
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _give_back_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


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
