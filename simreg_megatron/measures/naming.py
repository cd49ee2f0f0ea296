# SPDX-License-Identifier: Apache-2.0
"""From the sums of a log interval to its means, under the names of the log. Sums are those of all ranks."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from simreg_megatron.measures import geometry, slots
from simreg_megatron.measures.geometry import NormSums, coefficient_of_variation, cohens_d, mean_norm

_SHARES = (0.1, 0.5, 0.9)
QUANTILES = {f"simreg margin {share:.0%}": share for share in _SHARES}
RIGHT_QUANTILES = {f"simreg margin of right predictions {share:.0%}": share for share in _SHARES}
_NOT_IN_CONSOLE = (  # Megatron's line is long enough
    "simreg norm difference of rare labels",
    "simreg effective rank",
    "simreg mean cosine",
    "simreg margin of right predictions",
    "simreg share of right predictions",
    *QUANTILES,
    *RIGHT_QUANTILES,
)


def _mean(sums: Tensor, numerator: int, denominator: int) -> Tensor:
    return (sums[numerator] / sums[denominator].clamp(min=1)).float()


def losses(sums: Tensor, objectives: Mapping[str, int]) -> dict[str, Tensor]:
    """Name each objective's mean term, found in the given slot."""
    shown = {"simreg" if name == "none" else name: slot for name, slot in objectives.items()}
    return {f"{name} loss": _mean(sums, slot, slots.TOKENS) for name, slot in shown.items()}


def geometry_of(sums: Tensor) -> dict[str, Tensor]:
    """Name cosines, norms and angles."""
    mean, first = functools.partial(_mean, sums), slots.PAIRS.start
    negative = mean(first + 2, first + 3)
    norms = NormSums(*sums[slots.NORMS].unbind())
    once, often = (NormSums(*sums[of].unbind()) for of in (slots.ONCE_NORMS, slots.OFTEN_NORMS))
    return {
        "simreg positive cosine": mean(first, first + 1),
        "simreg negative cosine": negative,
        "simreg largest negative cosine": mean(first + 4, first + 5),
        "simreg norm": mean_norm(norms).float(),
        "simreg norm variation": coefficient_of_variation(norms).float(),
        "simreg norm difference of rare labels": cohens_d(once, often).float(),
        "simreg mean angle": torch.tensor(geometry.mean_angle_degrees(negative.item())),
    }


def margins(sums: Tensor) -> dict[str, Tensor]:
    """Name mean margins and the share of right predictions; NaN if there are none."""
    total, number = sums[slots.MARGIN]
    of_right, number_right = sums[slots.RIGHT_MARGIN]
    return {
        "simreg margin": (total / number).float(),
        "simreg margin of right predictions": (of_right / number_right).float(),
        "simreg share of right predictions": (number_right / number).float(),
    }


def isotropy(moments: list[Tensor]) -> dict[str, Tensor]:
    """Name the isotropy of the states and the norm of their mean; empty if no moments were measured."""
    if not moments:
        return {}
    found = geometry.isotropy(geometry.Moments._make(moments))
    return {
        "simreg isotropy": found.score.float(),
        "simreg effective rank": found.effective_rank.float(),
        "simreg mean cosine": found.mean_cosine.float(),
    }


def add_to_console(means: dict[str, Tensor], total_loss_dict: dict[str, Any], *, skipped: bool) -> None:
    """Put interval means where `training_log` prints its own: it divides every entry by the advanced iterations.

    Some are for TensorBoard and Weights & Biases alone.
    """
    advanced = total_loss_dict.get("advanced iterations", 0) + (0 if skipped else 1)
    for name, value in means.items():
        if name not in _NOT_IN_CONSOLE:
            total_loss_dict[name] = value * max(1, advanced)


def left_out_of_console(means: Mapping[str, Tensor]) -> str:
    """Select the values that `training_log` does not print, as it prints only numbers of 0 and more."""
    values = {name: float(value) for name, value in means.items() if name not in _NOT_IN_CONSOLE}
    return " | ".join(f"{name}: {value:.6E}" for name, value in values.items() if not value >= 0)
