# SPDX-License-Identifier: Apache-2.0
"""Similarities as shifted logits: s(a, k) = (sim(a, k) - sim(a, a)) / temperature.

The shift by the anchor's similarity to itself cancels in SimReg, which compares two log-sums of one anchor.
It keeps float32 exact where it matters: an anchor's own logit is 0, so nothing of size 1 / temperature is
added and taken away again. The shift is differentiable on purpose: callers set the own logit to a constant 0.

A similarity is a function (anchors [..., p, d], keys [..., q, d], temperature) -> [..., p, q]. To add one,
put it in SIMILARITIES. Rows must not be all zero.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from simreg_megatron.kernels.precision import product

Similarity = Callable[[Tensor, Tensor, float], Tensor]


def unit_rows(rows: Tensor) -> Tensor:
    """Divide by the norm along the last dimension, for any scale that the dtype can hold.

    The largest entry is divided out first, so that squares neither overflow nor vanish. The result does not
    depend on that divisor, which is why it needs no gradient.
    """
    scaled = rows / rows.detach().abs().amax(dim=-1, keepdim=True)
    return scaled / torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)


def _cosine(anchors: Tensor, keys: Tensor, temperature: float) -> Tensor:
    """(cos(a, k) - 1) / temperature."""
    return (product(unit_rows(anchors), unit_rows(keys).mT) - 1.0) / temperature


def _dot(anchors: Tensor, keys: Tensor, temperature: float) -> Tensor:
    """(<a, k> - ||a||^2) / temperature."""
    return (product(anchors, keys.mT) - anchors.square().sum(dim=-1, keepdim=True)) / temperature


def _qnorm(anchors: Tensor, keys: Tensor, temperature: float) -> Tensor:
    """(<a / ||a||, k> - ||a||) / temperature: a long key counts for more."""
    return (product(unit_rows(anchors), keys.mT) - _norms(anchors)) / temperature


def _dnorm(anchors: Tensor, keys: Tensor, temperature: float) -> Tensor:
    """||a|| (cos(a, k) - 1) / temperature: a long anchor is judged at a lower temperature."""
    return _norms(anchors) * _cosine(anchors, keys, temperature)


def _norms(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=-1, keepdim=True)


def learnable(query: Tensor, key: Tensor) -> Similarity:
    """<a, k> / (||a||^gamma_q ||k||^gamma_d), each gamma the sigmoid of a trained scalar; 0 is halfway to the cosine.

    gamma (1, 1) is the cosine, (0, 0) dot, (1, 0) qnorm and (0, 1) dnorm. Source: arXiv 2602.09229.
    """
    gamma_q, gamma_d = torch.sigmoid(query), torch.sigmoid(key)

    def logits(anchors: Tensor, keys: Tensor, temperature: float) -> Tensor:
        anchor_norms, key_norms = _norms(anchors), _norms(keys).mT
        scales = anchor_norms ** (1.0 - gamma_q) * key_norms ** (1.0 - gamma_d)
        own = anchor_norms ** (2.0 - gamma_q - gamma_d)
        return (scales * product(unit_rows(anchors), unit_rows(keys).mT) - own) / temperature

    return logits


SIMILARITIES: dict[str, Similarity] = {"cosine": _cosine, "dot": _dot, "qnorm": _qnorm, "dnorm": _dnorm}


def check_exponents(name: str, exponents: tuple[Tensor, Tensor] | None) -> None:
    if (name == "learnable") != (exponents is not None):
        raise ValueError("similarity 'learnable' and the two scalars of exponents belong together: give both or none.")
    if exponents is not None and [getattr(each, "numel", lambda: 0)() for each in exponents] != [1, 1]:
        raise ValueError("exponents must be two tensors of one number each: others would scale features or tokens.")


def get_similarity(name: str, exponents: tuple[Tensor, Tensor] | None = None) -> Similarity:
    """Return the similarity of that name; a ValueError names all. "learnable" takes its two scalars."""
    check_exponents(name, exponents)
    if exponents is not None:
        return learnable(*exponents)
    if name not in SIMILARITIES:
        known = ", ".join((*SIMILARITIES, "learnable"))
        raise ValueError(f"similarity {name!r} is not available; choose one of {known}.")
    return SIMILARITIES[name]
