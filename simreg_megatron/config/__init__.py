# SPDX-License-Identifier: Apache-2.0
"""Every setting in a frozen record, checked when it is made; `flags` is how they are given on a command line."""

from simreg_megatron.config.adagc import AdaGCConfig
from simreg_megatron.config.simreg import SimRegConfig

__version__ = "0.1.0"
__all__ = ["AdaGCConfig", "SimRegConfig"]
