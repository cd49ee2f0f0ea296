# SPDX-License-Identifier: Apache-2.0
"""Training objectives on hidden states, in plain torch: no process groups, no Megatron."""

from simreg_megatron.losses.simreg import simreg_loss

__all__ = ["simreg_loss"]
