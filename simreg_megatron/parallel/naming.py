# SPDX-License-Identifier: Apache-2.0
"""The one tensor of a log interval's sums, which ranks add up, and its means under the names of the log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from simreg_megatron.losses import geometry
from simreg_megatron.losses.geometry import NormSums, coefficient_of_variation, cohens_d, mean_norm

# Places in the tensor; terms of further objectives come last.
TERM, TOKENS, ALL_MASKED, ZERO_NORM, ONE_LABEL = range(5)
ODDITIES = {
    ALL_MASKED: "sequences (or a rank's parts of them) whose tokens are all masked",
    ONE_LABEL: "tokens in chunks with one label only",
    ZERO_NORM: "hidden states of norm zero",
}
PAIRS = slice(5, 11)  # (sum, count) of positive, negative and largest negative cosines
NORMS = slice(11, 14)  # geometry.NormSums of the tokens that count
ONCE_NORMS, OFTEN_NORMS = slice(14, 17), slice(17, 20)  # of tokens alone with their label in a chunk; of all others
OF_LABELS = slice(ONCE_NORMS.start, OFTEN_NORMS.stop)
MARGIN, RIGHT_MARGIN = slice(20, 22), slice(22, 24)  # sum and count of classification margins
OF_MARGINS = slice(MARGIN.start, RIGHT_MARGIN.stop)
NUMBER = 24
MEASURED = slice(ALL_MASKED, NUMBER)  # in log steps alone; what is before it, and terms behind it, in every step

_SHARES = (0.1, 0.5, 0.9)
QUANTILES = {f"simreg margin {share:.0%}": share for share in _SHARES}
RIGHT_QUANTILES = {f"simreg margin of right predictions {share:.0%}": share for share in _SHARES}
_NOT_IN_CONSOLE = (  # Megatron's line is long enough
    "simreg norm difference of rare labels", "simreg effective rank", "simreg mean cosine",
    "simreg margin of right predictions", "simreg share of right predictions", *QUANTILES, *RIGHT_QUANTILES,
)  # fmt: skip


def _mean(sums: Tensor, numerator: int, denominator: int) -> Tensor:
    return (sums[numerator] / sums[denominator].clamp(min=1)).float()


def losses(sums: Tensor, objectives: Mapping[str, int]) -> dict[str, Tensor]:
    """Name each objective's mean term, found in the given slot."""
    shown = {"simreg" if name == "none" else name: slot for name, slot in objectives.items()}
    return {f"{name} loss": _mean(sums, slot, TOKENS) for name, slot in shown.items()}


def geometry_of(sums: Tensor, moments: list[Tensor]) -> dict[str, Tensor]:
    """Name cosines, norms, angles, and the isotropy of the states if moments were measured."""
    positive, negative, largest = (_mean(sums, place, place + 1) for place in range(PAIRS.start, PAIRS.stop, 2))
    norms, once, often = (NormSums(*sums[place].unbind()) for place in (NORMS, ONCE_NORMS, OFTEN_NORMS))
    named = {
        "simreg positive cosine": positive,
        "simreg negative cosine": negative,
        "simreg largest negative cosine": largest,
        "simreg norm": mean_norm(norms),
        "simreg norm variation": coefficient_of_variation(norms),
        "simreg norm difference of rare labels": cohens_d(once, often),
        "simreg mean angle": torch.tensor(geometry.mean_angle_degrees(negative.item())),
    }
    if moments:
        names = "simreg isotropy", "simreg effective rank", "simreg mean cosine"
        named |= zip(names, geometry.isotropy(geometry.Moments._make(moments)), strict=True)
    return {name: value.float() for name, value in named.items()}


def margins(sums: Tensor) -> dict[str, Tensor]:
    """Name mean margins and the share of right predictions; NaN if there are none."""
    total, number = sums[MARGIN]
    of_right, number_right = sums[RIGHT_MARGIN]
    return {
        "simreg margin": (total / number).float(),
        "simreg margin of right predictions": (of_right / number_right).float(),
        "simreg share of right predictions": (number_right / number).float(),
    }


def add_to_console(means: dict[str, Tensor], total_loss_dict: dict[str, Any], *, skipped: bool) -> None:
    """Put interval means where `training_log` prints its own: it divides every entry by the advanced iterations."""
    advanced = total_loss_dict.get("advanced iterations", 0) + (0 if skipped else 1)
    for name, value in means.items():
        if name not in _NOT_IN_CONSOLE:
            total_loss_dict[name] = value * max(1, advanced)


def left_out_of_console(means: Mapping[str, Tensor]) -> str:
    """Select the values that `training_log` does not print, as it prints only numbers of 0 and more."""
    values = {name: float(value) for name, value in means.items() if name not in _NOT_IN_CONSOLE}
    return " | ".join(f"{name}: {value:.6E}" for name, value in values.items() if not value >= 0)
