# SPDX-License-Identifier: Apache-2.0
"""Every setting in a frozen record, checked when it is made; `flags` is how they are given on a command line."""

from simreg_megatron.config.adagc import ADAGC_VARIANTS, AdaGCConfig
from simreg_megatron.config.simreg import (
    CHUNK_WEIGHTS,
    GROUP_REDUCTIONS,
    IMPLEMENTATIONS,
    PLACEMENTS,
    SCOPES,
    SELF_POSITIVES,
    SIMILARITIES,
    SimRegConfig,
)
from simreg_megatron.config.values import as_typed

__all__ = [
    "ADAGC_VARIANTS",
    "CHUNK_WEIGHTS",
    "GROUP_REDUCTIONS",
    "IMPLEMENTATIONS",
    "PLACEMENTS",
    "SCOPES",
    "SELF_POSITIVES",
    "SIMILARITIES",
    "AdaGCConfig",
    "SimRegConfig",
    "as_typed",
]
