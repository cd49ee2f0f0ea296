# SPDX-License-Identifier: Apache-2.0
"""The settings of adaptive clipping."""

from __future__ import annotations

import math
from dataclasses import dataclass

from simreg_megatron.config.values import refuse_other_kinds

ADAGC_VARIANTS = ("clipped", "raw", "global")


@dataclass(frozen=True)
class AdaGCConfig:
    """Settings of adaptive clipping; see `simreg_megatron.adagc.AdaGC`.

    Attributes:
        lambda_rel: how far above its moving average a parameter's gradient norm may rise.
        lambda_abs: largest global norm during the warm-up.
        beta: of the moving average.
        warmup_iters: steps that are clipped by their global norm.
        variant: "clipped", "raw" or "global".

    Raises:
        ValueError: a setting is impossible.
    """

    lambda_rel: float = 1.04
    lambda_abs: float = 1.0
    beta: float = 0.99
    warmup_iters: int = 100
    variant: str = "clipped"

    def __post_init__(self) -> None:
        refuse_other_kinds("AdaGC", self)
        for name, number in (("lambda-rel", self.lambda_rel), ("lambda-abs", self.lambda_abs)):
            if not (math.isfinite(number) and number > 0):
                raise ValueError(f"AdaGC's {name} must be a finite number above 0, not {number}")
        if not 0 <= self.beta < 1:
            raise ValueError(f"AdaGC's beta must be at least 0 and below 1, not {self.beta}")
        if self.warmup_iters < 0:
            raise ValueError(f"AdaGC's warm-up must be 0 or more iterations, not {self.warmup_iters}")
        if self.variant not in ADAGC_VARIANTS:
            raise ValueError(f"unknown AdaGC variant {self.variant!r}: choose from {', '.join(ADAGC_VARIANTS)}")
