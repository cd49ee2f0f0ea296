# SPDX-License-Identifier: Apache-2.0
"""Which form `impl="auto"` stands for on a GPU: the fastest of those that are right there, on rows of the run's shape.

A form that is right on one GPU, one driver and one release of Triton may not be on the next, and which is fastest
depends on the shape. So both are found out where the run is, once, before its first step:

* right: loss and gradient of some two thousand tokens, some masked, differ from the reference in float64 by at most
  LOSS_ERROR and GRADIENT_ERROR, beside the error of sums (and half a unit of the rows' own type); longer chunks are
  compared with the tiles in float32, which were compared with the reference before;
* fast: forward and backward of the whole shape, the best of a few.

A form that fails, or does not fit into memory, is excluded and named in the log. All ranks agree on one form.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from simreg_megatron.kernels.contrast import MODULES
from simreg_megatron.losses.simreg import AUTO, simreg_loss

LOSS_ERROR, GRADIENT_ERROR = 1e-5, 3e-4
_SUMMED_AT_ONCE = 16  # numbers of half precision in a product, by a tensor core of an H100
_COMPARED = 2048  # tokens, at most, that the reference computes in float64
_COLDEST = 0.01  # at lower temperatures float32 has no number as small as the loss of the sample
_ROUNDS = 5


class Shape(NamedTuple):
    """What a rank computes on: [length, batch, width] as Megatron has its hidden states."""

    batch: int
    length: int
    width: int
    chunk_size: int
    dtype: torch.dtype
    temperature: float = 0.01

    def __str__(self) -> str:
        chunks = f"chunks of {self.chunk_size}" if 0 < self.chunk_size < self.length else "whole sequences"
        return f"{self.batch} x {self.length} x {self.width} ({str(self.dtype).removeprefix('torch.')}, {chunks})"


class Trial(NamedTuple):
    """What became of one form."""

    impl: str
    loss_error: float  # relative
    gradient_error: float  # relative, Frobenius norm
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


def take(impl: str, shape: Shape, device: torch.device) -> None:
    """From now on `auto` is this form, for rows of this type on such a device."""
    AUTO[device.type, shape.dtype] = impl


def sentence(trials: Sequence[Trial], shape: Shape) -> str:
    """For the log."""
    taken = fastest(trials)
    others = ", ".join(str(trial) for trial in trials if trial.impl != taken)
    (own,) = (trial for trial in trials if trial.impl == taken)
    return f"impl auto is {own} a micro-batch of {shape}" + (f"; tried as well: {others}" if others else "")


def _trial(impl: str, shape: Shape, device: torch.device) -> Trial:
    rounding = torch.finfo(shape.dtype).eps / 2
    for size, yardstick in _comparisons(shape, impl):
        errors = _errors(impl, size, yardstick, device)
        lost = error_of_sums(size.dtype, size.width, size.temperature)
        right = errors[0] <= LOSS_ERROR + lost and errors[1] <= GRADIENT_ERROR + lost + rounding
        if not right:  # nor if one is NaN
            wrong = f"is wrong (loss off by {errors[0]:.1e}, gradient by {errors[1]:.1e})"
            return Trial(impl, *errors, math.inf, wrong)
    rows, labels, valid = sample(shape, device)
    seconds = _seconds(lambda: _value_and_gradient(rows, labels, valid, shape, impl), device)
    return Trial(impl, *errors, seconds)


def error_of_sums(dtype: torch.dtype, width: int, temperature: float) -> float:
    """What the sums behind the cosines may add to a relative error, which the temperature divides.

    float32 rounds after each number, to either side. Tensor cores add up some numbers of half precision at once, and
    cut off what does not fit into float32: always towards zero.

    Source: Fasi, Higham, Mikaitis and Pranesh 2021, Numerical behavior of NVIDIA tensor cores.
    """
    units = width / _SUMMED_AT_ONCE if dtype.itemsize == 2 else math.sqrt(width)
    return units * 2.0**-24 / temperature


def _errors(impl: str, shape: Shape, yardstick: str, device: torch.device) -> tuple[float, float]:
    rows, labels, valid = sample(shape, device)
    exact = rows.double() if yardstick == "reference" else rows.float()
    expected_loss, expected_grad = _value_and_gradient(exact, labels, valid, shape, yardstick)
    factor = _to_unit_size(expected_grad)
    loss, grad = _value_and_gradient(rows, labels, valid, shape, impl, factor)
    return _apart(loss, expected_loss), _apart(grad, expected_grad * factor)


def _to_unit_size(grad: Tensor) -> float:
    """A factor that brings its largest number near 1, as a loss scale would: float16 has none of 1e-10."""
    _, exponent = math.frexp(grad.abs().max().item())
    return 2.0**-exponent


def _comparisons(shape: Shape, impl: str) -> list[tuple[Shape, str]]:
    """Few tokens against the reference, also where every pair weighs; a longer chunk against the tiles, too."""
    chunk = shape.chunk_size if 0 < shape.chunk_size < shape.length else shape.length
    temperature = max(shape.temperature, _COLDEST)
    short = shape._replace(batch=min(shape.batch, 2), length=min(shape.length, _COMPARED), temperature=temperature)
    # At tau 0.01 a few close pairs are all there is: a tile of others could be missing unseen.
    found = [(short, "reference"), (short._replace(temperature=1.0), "reference")]
    if chunk > _COMPARED and impl != "tiled":
        found += [(size._replace(batch=1, length=shape.length), "tiled") for size, _ in found]
    return found


def sample(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [length, batch, width], labels and a mask [batch, length], the same on every rank and device.

    Labels by Zipf's law, rows around one centre a label: losses as late in training.
    """
    generator = torch.Generator().manual_seed(1)
    num_labels = 512
    chances = 1 / torch.arange(1.0, num_labels + 1)
    size = shape.batch, shape.length
    labels = torch.multinomial(chances, math.prod(size), replacement=True, generator=generator).view(size).to(device)
    valid = (torch.rand(size, generator=generator) < 0.9).to(device)
    centres = (torch.randn(num_labels, shape.width, generator=generator) + 1.5).to(device)
    noise = torch.randn(1024, shape.width, generator=generator).to(device)  # used again and again: made on the host
    which = torch.randint(0, 1024, size, generator=generator).to(device)
    rows = torch.empty(shape.length, shape.batch, shape.width, dtype=shape.dtype, device=device)
    for number in range(shape.batch):
        rows[:, number] = (centres[labels[number]] + 0.6 * noise[which[number]]).to(shape.dtype)
    return rows, labels, valid


def _value_and_gradient(
    rows: Tensor, labels: Tensor, valid: Tensor, shape: Shape, impl: str, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The gradient is that of `factor` times the value."""
    leaf = rows.detach().requires_grad_()
    loss = simreg_loss(
        leaf.transpose(0, 1), labels, valid=valid, chunk_size=shape.chunk_size, temperature=shape.temperature, impl=impl
    )
    (loss * factor).backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def _apart(one: Tensor, other: Tensor) -> float:
    """With one copy in float64 at a time: gradients of long sequences take gigabytes as they are."""
    difference, size = (torch.linalg.vector_norm(part, dtype=torch.float64) for part in (one - other, other))
    return (difference / size).item()


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Of the best of a few rounds, after one that does not count."""
    best = math.inf
    for number in range(_ROUNDS + 1):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        if number:
            best = min(best, time.perf_counter() - start)
    return best


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
