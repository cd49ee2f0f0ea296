# SPDX-License-Identifier: Apache-2.0
"""Results of one run's ranks, joined to the whole model, and how far it is from the reference."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.versions import tiny
from tests.versions.driver import MODES, RUNS

TOLERANCE = 2e-5
"""Largest relative difference that is still "equals": one fp32 computation, its sums taken in another order."""


class RunError(RuntimeError):
    """A run has nothing to compare; the message says why."""


@dataclass(frozen=True)
class Outcome:
    """Losses of every micro-batch and gradients of every parameter of the whole model, by run (mode and variant)."""

    losses: dict[str, Tensor]
    grads: dict[str, dict[str, Tensor]]


def read(folder: Path, processes: int) -> Outcome:
    """Join the ranks of one run; RunError if one failed or wrote nothing, or two hold other bits of one parameter."""
    paths = [folder / f"rank{rank}.pt" for rank in range(processes)]
    ranks = [torch.load(path, weights_only=True) for path in paths if path.exists()]
    errors = [rank["error"] for rank in ranks if "error" in rank]
    if errors:  # a rank that lost the other one knows less than that one
        raise RunError(min(errors, key=lambda error: "by peer" in error))
    if len(ranks) < processes:
        raise RunError("a rank ended without a word")
    return Outcome(
        {name: torch.tensor(_one([rank[name]["losses"] for rank in ranks])).double() for name in RUNS},
        {name: _joined(ranks, name) for name in RUNS},
    )


def _one(losses: list[list[float]]) -> list[float]:
    known = [values for values in losses if values]
    if not known or any(values != known[0] for values in known):
        raise RunError(f"losses differ between ranks: {losses}")
    return known[0]


def _joined(ranks: list[dict[str, Any]], run: str) -> dict[str, Tensor]:
    parts: dict[str, dict[int, Tensor]] = {}
    shards: dict[str, tiny.Shard] = {}
    for rank in ranks:
        for name, grad in rank[run]["grads"].items():
            shards[name] = rank["shards"][name]
            known = parts.setdefault(name, {}).setdefault(shards[name][1], grad)
            if not torch.equal(known, grad):
                raise RunError(f"the gradient of {name} differs between ranks that share it")
    return {name: tiny.whole(parts[name], name, shards[name]) for name in parts}


def same_bits(one: Outcome, other: str, another: str) -> bool:
    """Return whether two variants of a run are equal bit for bit, in both modes."""
    for mode in MODES:
        first, second = f"{mode} {other}", f"{mode} {another}"
        grads = zip(one.grads[first].items(), one.grads[second].items(), strict=True)
        if not torch.equal(one.losses[first], one.losses[second]):
            return False
        if any(a != b or not torch.equal(x, y) for (a, x), (b, y) in grads):
            return False
    return True


@dataclass(frozen=True)
class Difference:
    """The largest over micro-batches and over parameters, relative to the reference."""

    loss: float
    grad: float

    @property
    def equals(self) -> bool:
        return self.loss <= TOLERANCE and self.grad <= TOLERANCE


def difference(reference: Outcome, other: Outcome, variant: str = "on") -> Difference:
    """The larger one of both modes; RunError where they have other parameters."""
    runs = [f"{mode} {variant}" for mode in MODES]
    apart = [_run_apart(reference, run, other, run) for run in runs]
    return Difference(largest(one.loss for one in apart), largest(one.grad for one in apart))


def settings_apart(reference: Outcome, theirs: str, other: Outcome, ours: str) -> Difference:
    """Compare runs with some settings, which are in the first mode alone; likewise."""
    return _run_apart(reference, f"{MODES[0]} {theirs}", other, f"{MODES[0]} {ours}")


def _run_apart(reference: Outcome, theirs: str, other: Outcome, ours: str) -> Difference:
    expected, grads = reference.grads[theirs], other.grads[ours]
    if expected.keys() != grads.keys():
        raise RunError(f"other parameters: {sorted(expected.keys() ^ grads.keys())}")
    losses = (reference.losses[theirs] - other.losses[ours]).abs() / reference.losses[theirs]
    return Difference(losses.max().item(), largest(_apart(grad, grads[name]) for name, grad in expected.items()))


def share(outcome: Outcome) -> float:
    """SimReg's part of the gradient, the smaller one of both modes: norm(g_on - g_absent) / norm(g_on)."""
    shares = []
    for mode in MODES:
        on, absent = outcome.grads[f"{mode} on"], outcome.grads[f"{mode} absent"]
        parts = torch.stack([(on[name] - absent[name]).double().norm() for name in on]).norm()
        shares.append((parts / torch.stack([grad.double().norm() for grad in on.values()]).norm()).item())
    return min(shares)


def _apart(one: Tensor, other: Tensor) -> float:
    return ((one - other).double().norm() / one.double().norm().clamp(min=1e-30)).item()


def largest(differences: Iterable[float]) -> float:
    """Their maximum; NaN is as far as it gets."""
    return max(value if value == value else math.inf for value in differences)
