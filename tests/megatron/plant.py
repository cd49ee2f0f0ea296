# SPDX-License-Identifier: Apache-2.0
"""NaN and infinity planted in one rank of a run: `plant:numbers`, a function to call before it starts.

RECORD_OUT/plan.json has the rank and, for each step after the first, where the number goes and which it is; each rank
writes what every step changed, and whether an optimizer stepped. A number in a weight is taken out after the step.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.fixtures.snapshot import taken

PLACES = ("weight", "states", "gradient", "mask")
"""Where the language-model loss fails, too. "term" is SimReg's own failure."""
WEIGHT = "linear_fc2.weight"  # of the first layer, or expert, of the rank
Pieces = dict[tuple[str, str], Any]


def numbers() -> None:
    import megatron.training.training as training

    out, rank = Path(os.environ["RECORD_OUT"]), int(os.environ["RANK"])
    plan = json.loads((out / "plan.json").read_text())
    report: list[dict[str, Any]] = []
    train_step = training.train_step

    def planted(forward: Any, data: Any, models: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        place, number = plan["steps"][len(report)]
        before = pieces_of(models, optimizer)
        report.append({"place": place, "number": number, "changed": None, "stepped": False, "skipped": None})
        here = bool(place) and rank == plan["rank"]
        try:
            with _planting(models, place, float(number)) if here else nullcontext():
                result = train_step(forward, data, models, optimizer, *args, **kwargs)
            report[-1]["skipped"] = int(result[1])
            return result
        finally:
            report[-1]["changed"] = changed(before, pieces_of(models, optimizer))
            _write(out, rank, report)

    def stepping(*_: Any) -> None:
        report[-1]["stepped"] = True
        _write(out, rank, report)  # at once: a rank that another one's failure ends writes nothing later

    register_optimizer_step_pre_hook(stepping)
    training.train_step = planted


def _write(out: Path, rank: int, report: list[dict[str, Any]]) -> None:
    path = out / f"planted{rank}.json"
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(report))
    partial.replace(path)


def pieces_of(models: Any, optimizer: Any) -> Pieces:
    """Weights and all that the optimizer keeps, of this rank."""

    class NoScheduler:
        def state_dict(self) -> dict[str, Any]:
            return {}

    found: Pieces = taken(models, optimizer, NoScheduler())["pieces"]
    return found


def changed(before: Pieces, after: Pieces) -> list[str]:
    """Names of what is not the same bit for bit, or is only there now."""
    kept = {key for key, piece in after.items() if key in before and _is_same(before[key][2], piece[2])}
    return sorted(map(" ".join, after.keys() - kept))


def _is_same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(nan=12345.0), other.nan_to_num(nan=12345.0))


def _planting(models: Any, place: str, number: float) -> Any:
    chunk = models[-1]
    ways = {"weight": _in_weight, "states": _in_states, "gradient": _in_gradient, "mask": _in_mask, "term": _in_term}
    return ways[place](chunk, number)


@contextmanager
def _in_weight(chunk: Any, number: float) -> Iterator[None]:
    weight = next(parameter for name, parameter in chunk.named_parameters() if name.endswith(WEIGHT)).data.view(-1)
    before = weight[0].clone()
    weight[0] = number
    try:
        yield
    finally:
        weight[0] = before


@contextmanager
def _in_states(chunk: Any, number: float) -> Iterator[None]:
    """In one element of what the last layer of this rank puts out, in the first micro-batch."""
    done: list[None] = []

    def spoiled(module: Any, given: Any, states: Tensor) -> Tensor:
        if done:
            return states
        done.append(None)
        return _spoiled(states, number)

    yield from _while_hooked(_inner(chunk).decoder.register_forward_hook(spoiled))


@contextmanager
def _in_gradient(chunk: Any, number: float) -> Iterator[None]:
    """In one element of the gradient of these states, while they and the loss are sound."""
    done: list[None] = []

    def spoiled(gradient: Tensor) -> Tensor:
        if done:
            return gradient
        done.append(None)
        return _spoiled(gradient, number)

    def watched(module: Any, given: Any, states: Tensor) -> Tensor:
        states.register_hook(spoiled)
        return states.clone()

    yield from _while_hooked(_inner(chunk).decoder.register_forward_hook(watched))


@contextmanager
def _in_term(chunk: Any, number: float) -> Iterator[None]:
    """Plant in one element of the terms of the first micro-batch, for any objective."""
    from simreg_megatron.plugin.term import Regularizer

    compute, done = Regularizer._compute, list[None]()

    def spoiled(self: Any, *args: Any) -> Any:
        computed = compute(self, *args)
        if done:
            return computed
        done.append(None)
        return computed._replace(terms=_spoiled(computed.terms, number))

    with mock.patch.object(Regularizer, "_compute", spoiled):
        yield


def _spoiled(numbers: Tensor, number: float) -> Tensor:
    spot = torch.zeros_like(numbers)
    spot[(0,) * spot.dim()] = number
    return numbers + spot


@contextmanager
def _in_mask(chunk: Any, number: float) -> Iterator[None]:
    """In one element of the loss mask that the model and the loss function are given, in the first micro-batch."""
    done: list[None] = []

    def spoiled(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if not done:
            done.append(None)
            kwargs["loss_mask"][0, 0] = number

    yield from _while_hooked(_inner(chunk).register_forward_pre_hook(spoiled, with_kwargs=True))


def _while_hooked(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def _inner(model: Any) -> Any:
    while hasattr(model, "module"):
        model = model.module
    return model
