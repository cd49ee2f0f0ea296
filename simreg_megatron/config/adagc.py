# SPDX-License-Identifier: Apache-2.0
"""The settings of adaptive clipping."""

from __future__ import annotations

import math
from dataclasses import dataclass

from simreg_megatron.config.values import refuse_other_types
from simreg_megatron.notices import refuse

ADAGC_VARIANTS = ("clipped", "raw", "global")


@dataclass(frozen=True)
class AdaGCConfig:
    """Settings of adaptive clipping; see `simreg_megatron.adagc.AdaGC`. ValueError if one is impossible.

    Attributes:
        lambda_rel: largest gradient norm of a parameter, over its moving average; up to 1 no average rises again.
        lambda_abs: largest global norm during the warm-up.
        beta: of the moving average.
        warmup_iters: steps that are clipped by their global norm.
        variant: "clipped", "raw" or "global".
    """

    lambda_rel: float = 1.04
    lambda_abs: float = 1.0
    beta: float = 0.99
    warmup_iters: int = 100
    variant: str = "clipped"

    def __post_init__(self) -> None:
        refuse_other_types("AdaGC", self)
        positive = (("lambda-rel", self.lambda_rel), ("lambda-abs", self.lambda_abs))
        refuse(
            *((not 0 < number < math.inf, f"AdaGC's {name} must be a finite number above 0, not {number}")
              for name, number in positive),
            (not 0 <= self.beta < 1, f"AdaGC's beta must be at least 0 and below 1, not {self.beta}"),
            (self.warmup_iters < 0, f"AdaGC's warm-up must be 0 or more iterations, not {self.warmup_iters}"),
            (self.variant not in ADAGC_VARIANTS,
             f"unknown AdaGC variant {self.variant!r}: choose from {', '.join(ADAGC_VARIANTS)}"),
        )  # fmt: skip
