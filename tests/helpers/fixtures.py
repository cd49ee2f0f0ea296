# SPDX-License-Identifier: Apache-2.0
"""Inputs that several tests share."""

import math

import torch
from torch import Tensor

F1_LABELS = (5, 2, 5, 7, 2, 5, 9, 7, 1, 2, 5, 3)


def fixture_f1(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Embeddings [12, 6] from a fixed formula, computed in float64 and then cast, and labels [12].

    x = sin(12.9898 i + 78.233 k) 43758.5453, E[i, k] = (x - floor(x) - 0.3) (1 + 0.15 (i - 1)); i, k from 1.
    """

    def entry(i: int, k: int) -> float:
        x = math.sin(12.9898 * i + 78.233 * k) * 43758.5453
        return (x - math.floor(x) - 0.3) * (1 + 0.15 * (i - 1))

    rows = [[entry(i, k) for k in range(1, 7)] for i in range(1, 13)]
    return torch.tensor(rows, dtype=torch.float64).to(dtype), torch.tensor(F1_LABELS)


def random_tokens(
    shape: tuple[int, int, int], *, num_labels: int, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Normal embeddings [b, n, d] and labels [b, n] below num_labels."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return embeddings, torch.randint(num_labels, shape[:2], generator=generator)


def without_pairs(case: str, rows: Tensor, labels: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Leave rows [b, n, d], labels [b, n] and mask with less to compare: "one token", "one label", "all masked", ..."""
    kept = {"one token": 1, "no tokens": 0}.get(case, labels.shape[1])
    rows, labels, valid = rows[:, :kept].clone(), labels[:, :kept].clone(), valid[:, :kept].clone()
    if case == "one label":
        labels.zero_()
    elif case == "no twin":
        labels[:] = torch.arange(kept)
    elif case == "all masked":
        valid.zero_()
    elif case == "zero row":
        rows[0, 2] = 0
    return rows, labels, valid


class One:
    """A process group of one rank; or of more, where only their number matters."""

    def __init__(self, size: int = 1) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0
