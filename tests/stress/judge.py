# SPDX-License-Identifier: Apache-2.0
"""How far a form of SimReg is from float64, in units of the bound that it must keep.

    |L_i - L_i*|                <=  delta (1 - exp(-L_i*)) + floor
    |e_i| |dL/de_i - dL*/de_i|  <=  delta reach_i + floor n / tau

    delta = eps ( (8 + sqrt(D) / 4) / tau + log2(n) + 4 ),    floor = 2 n exp(-80)

eps is float32's 2^-23, in which all forms compute, for states of any type; * is float64. The factor
1 - exp(-L) says that small terms keep their digits: an error of delta in the ratio of sums is an error of
delta (1 - exp(-L)) in its logarithm. `reach` is the sum of |dL / d cos| over the pairs of a state: the gradient
of a state that is surrounded by equal ones is a difference of numbers of that size. The fast forms take weights
below exp(-80) for 0, so terms below 1e-34 may be 0.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from simreg_megatron.losses import simreg_loss
from tests.stress import exact
from tests.stress.cases import Case

EPS = 2.0**-23
SMALLEST = 2 * math.exp(-80)


def delta(tau: float, length: int, width: int) -> float:
    """Return the bound of the logarithm of the ratio of both sums."""
    return EPS * ((8 + math.sqrt(width) / 4) / tau + math.log2(length) + 4)


class Judged(NamedTuple):
    """Largest error over its bound; above 1 it is broken."""

    value: float
    gradient: float
    finite: bool


def judge(case: Case, impl: str, anchors: Tensor) -> Judged:
    """Judge the terms and gradients of these anchors [b, p] of each sequence, each with a weight of its own."""
    rows = case.rows.clone().requires_grad_()
    options = {"temperature": case.tau, "chunk_size": 0, "impl": impl, "reduction": "none"}
    terms = simreg_loss(rows, case.labels, valid=case.valid, **options)
    weights = torch.zeros_like(terms)
    given = 0.5 + torch.arange(anchors.shape[1]) % 7 / 7
    weights.scatter_(1, anchors, given.expand_as(anchors).to(weights.dtype))
    (terms * weights).sum().backward()
    usable = case.valid & (case.rows != 0).any(dim=-1)
    wanted = exact.simreg(case.rows, case.labels, usable, anchors, weights.gather(1, anchors), case.tau)
    return _compared(case, terms.detach().gather(1, anchors), rows.grad, wanted)


def _compared(case: Case, terms: Tensor, gradient: Tensor | None, wanted: exact.Exact) -> Judged:
    assert gradient is not None
    bound = delta(case.tau, *case.rows.shape[1:])
    floor = case.rows.shape[1] * SMALLEST
    off = (terms.double() - wanted.terms).abs() / (bound * -torch.expm1(-wanted.terms) + floor)
    norms = _norms(case.rows)
    pull = gradient.double() * norms
    rounding = 0 if case.rows.dtype == torch.float32 else torch.finfo(case.rows.dtype).eps
    allowed = bound * wanted.reach + rounding * wanted.pull.norm(dim=-1) + floor * case.rows.shape[1] / case.tau
    least = norms.squeeze(-1) * math.sqrt(case.rows.shape[-1]) * torch.finfo(case.rows.dtype).tiny  # below it: zeros
    turned = (pull - wanted.pull).norm(dim=-1) / (allowed + least)
    shown = gradient.isfinite() | (wanted.pull / norms.clamp(min=1e-300)).abs().gt(torch.finfo(gradient.dtype).max)
    return Judged(float(off.max()), float(turned.masked_fill(~pull.isfinite().all(-1), 0).max()),
                  bool(terms.isfinite().all() and shown.all()))  # fmt: skip


def _norms(rows: Tensor) -> Tensor:
    largest = rows.double().abs().amax(dim=-1, keepdim=True).clamp(min=1e-300)
    return (rows.double() / largest).norm(dim=-1, keepdim=True) * largest
