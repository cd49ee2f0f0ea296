# SPDX-License-Identifier: Apache-2.0
"""A plan: question, claims, arms, seeds, sizes and lengths of one experiment, read from a small YAML file.

Everything that decides what is run and what would count as success stands in the file, before the first run. What the
file leaves open, no flag can add later: the program has options for where and how fast to run, and for fewer seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

SIGNS = ("lower", "higher", "differs")
METRICS = (
    "validation_loss", "bits_per_byte", "train_loss", "simreg_loss", "positive_cosine", "negative_cosine", "isotropy",
    "margin", "margin_10", "margin_50", "margin_90", "margin_right", "margin_right_10",
    "margin_right_50", "margin_right_90", "right_share", "rare_norm_difference", "seconds_per_step",
)  # fmt: skip
_ANY, _SHARE = (0.0, 1e6), (0.0, 1.0)
RANGES = {
    **dict.fromkeys(("validation_loss", "bits_per_byte", "train_loss", "simreg_loss"), _ANY),
    **dict.fromkeys(("positive_cosine", "negative_cosine"), (-1.0, 1.0)),
    "isotropy": _SHARE,
    "right_share": _SHARE,
    "seconds_per_step": (math.ulp(0.0), math.inf),
}
"""Of those that have bounds."""

Flags = dict[str, str]
"""Flags of launch/pretrain_*.sh without their dashes; "" is the value of a flag that stands alone."""


@dataclass(frozen=True)
class Arm:
    """One kind of run.

    Attributes:
        flags: what sets it apart.
        tuned_as: the arm of the plan's `tuned_in` whose best trial it takes over.
        trials: the settings that are tried, one run each; empty where an arm is run with its flags as they are.
        trials_at: others for some sizes, which may be fewer.
        preset: of an arm of a search: its flags beside a real size's preset, which has the paper's settings and which
            nobody searched.
        length: share of the plan's tokens that it trains on, with a schedule of its own that ends there.
    """

    name: str
    flags: Flags = field(default_factory=dict)
    tuned_as: str = ""
    trials: tuple[Flags, ...] = ()
    trials_at: Mapping[str, tuple[Flags, ...]] = field(default_factory=dict)
    preset: Flags = field(default_factory=dict)
    length: float = 1.0

    def trials_of(self, size: int | str) -> tuple[Flags, ...]:
        return self.trials_at.get(str(size), self.trials)


@dataclass(frozen=True)
class Claim:
    """A sentence that the runs may refute: `metric` of `arm` is lower (or higher) than `times` that of `than`."""

    says: str
    arm: str
    than: str
    metric: str = "validation_loss"
    sign: str = "lower"
    times: float = 1.0
    headline: bool = False  # to be told first, so it needs more seeds


@dataclass(frozen=True)
class Plan:
    """One experiment.

    Attributes:
        sizes: widths of the small family (`shapes.Shape`), or names of presets such as "tiny" and "350m".
        tokens_per_parameter: training tokens for each parameter outside the embeddings, one or several lengths.
        seeds: how many, counted from 1, or how many at each size.
        tuned_in: the experiment whose best trials the arms take over; "" where every arm is run as it is written.
        data: "large", "builtin", or a folder with train, valid and tokenizer.model.
        steps: of a preset, where they are not the preset's own.
        source: the figure or table of the paper.
    """

    name: str
    question: str
    arms: tuple[Arm, ...]
    claims: tuple[Claim, ...] = ()
    family: str = "llama"
    sizes: tuple[int | str, ...] = (64,)
    tokens_per_parameter: tuple[float, ...] = (20.0,)
    seeds: int | Mapping[str, int] = 3
    tuned_in: str = ""
    data: str = "large"
    steps: Mapping[str, int] = field(default_factory=dict)
    source: str = ""

    def seeds_at(self, size: int | str) -> int:
        return self.seeds if isinstance(self.seeds, int) else self.seeds[str(size)]

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    @property
    def is_search(self) -> bool:
        return any(arm.trials for arm in self.arms)

    @property
    def is_about_time(self) -> bool:
        """And nothing else: where its runs end is not asked."""
        return bool(self.claims) and all(claim.metric == "seconds_per_step" for claim in self.claims)


def as_content(plan: Plan) -> dict[str, Any]:
    """What `plan_of` makes the same plan of."""
    content = asdict(plan)
    content["arms"] = {arm.pop("name"): arm for arm in content["arms"]}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in content.items()}
