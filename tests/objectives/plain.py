# SPDX-License-Identifier: Apache-2.0
"""Definitions of objectives on one chunk, token by token and pair by pair, in float64: the sum of all terms.

Nothing is shared with the package. Rows are [n, D], labels [n].
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.helpers.oracle import naive_simreg

Oracle = Callable[[Tensor, Tensor, float], Tensor]


def _cosines(rows: Tensor) -> list[list[Tensor]]:
    return [[a @ b / (a.norm() * b.norm()) for b in rows] for a in rows]


def _others(i: int, labels: list[int]) -> tuple[list[int], list[int]]:
    """Tokens of the same label without i, and of other labels."""
    same = [j for j, y in enumerate(labels) if y == labels[i] and j != i]
    return same, [j for j, y in enumerate(labels) if y != labels[i]]


def _mean(values: list[Tensor]) -> Tensor:
    return sum(values, torch.zeros((), dtype=torch.float64)) / max(len(values), 1)


def simreg(rows: Tensor, labels: Tensor, temperature: float) -> Tensor:
    return naive_simreg(rows[None], labels[None], temperature=temperature)[0].sum()


def creg(rows: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """The mean over tokens with another positive, times all tokens."""
    cosines, names, found = _cosines(rows), labels.tolist(), []
    for i in range(len(rows)):
        same, other = _others(i, names)
        against = sum((torch.exp(cosines[i][j] / temperature) for j in other), torch.zeros((), dtype=torch.float64))
        each = [torch.exp(cosines[i][j] / temperature) for j in same]
        if same:
            found.append(_mean([-torch.log(own / (own + against)) for own in each]))
    return _mean(found) * len(rows)


def sce(rows: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Half labels, half similarities at 0.07 without the token itself; nothing where it is alone."""
    if len(rows) == 1:
        return rows.sum() * 0
    cosines, names, found = _cosines(rows), labels.tolist(), []
    for i in range(len(rows)):
        same, _ = _others(i, names)
        total = sum(torch.exp(cosine / temperature) for cosine in cosines[i])
        sharp = [0 if j == i else torch.exp(cosine / 0.07) for j, cosine in enumerate(cosines[i])]
        found.append(
            -sum(
                (0.5 * (j in (*same, i)) / (len(same) + 1) + 0.5 * sharp[j] / sum(sharp))
                * torch.log(torch.exp(cosine / temperature) / total)
                for j, cosine in enumerate(cosines[i])
            )
        )
    return _mean(found) * len(rows)


def cpretrain(rows: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Each token with the next of its label; other pairs of that label are left out."""
    names, pairs = labels.tolist(), []
    for i, name in enumerate(names):
        later = [j for j in range(i + 1, len(names)) if names[j] == name]
        pairs += [(i, later[0])] if later else []
    if len(pairs) < 2:
        return rows.sum() * 0
    cosines, found = _cosines(rows), []
    for m, (first, second) in enumerate(pairs):
        shown = [n for n, (i, _) in enumerate(pairs) if n == m or names[i] != names[first]]
        forth = sum(torch.exp(cosines[first][pairs[n][1]] / temperature) for n in shown)
        back = sum(torch.exp(cosines[second][pairs[n][0]] / temperature) for n in shown)
        own = torch.exp(cosines[first][second] / temperature)
        found.append(-0.5 * (torch.log(own / forth) + torch.log(own / back)))
    return _mean(found) * len(rows)


def sigmoid(rows: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """pair_reduction=balanced: half the mean over positive pairs and half that over negative ones."""
    cosines, names = _cosines(rows), labels.tolist()
    pairs = {True: [], False: []}
    for i in range(len(rows)):
        same, other = _others(i, names)
        pairs[True] += [torch.log1p(torch.exp(-cosines[i][j] / temperature)) for j in same]
        pairs[False] += [torch.log1p(torch.exp(cosines[i][j] / temperature)) for j in other]
    return (_mean(pairs[True]) + _mean(pairs[False])) / 2 * len(rows)


ORACLES: dict[str, Oracle] = {each.__name__: each for each in (simreg, creg, sce, cpretrain, sigmoid)}
