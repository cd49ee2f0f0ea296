# SPDX-License-Identifier: Apache-2.0
"""Training objectives on hidden states, in plain torch: no process groups, no Megatron."""

from simreg_megatron.losses.cpretrain import cpretrain_loss
from simreg_megatron.losses.creg import creg_loss
from simreg_megatron.losses.mic import mic_loss
from simreg_megatron.losses.prefixes_ce import prefixes_ce_loss
from simreg_megatron.losses.sce import sce_loss
from simreg_megatron.losses.sigmoid import sigmoid_loss
from simreg_megatron.losses.sigreg import sigreg_loss
from simreg_megatron.losses.simcse import simcse_loss
from simreg_megatron.losses.simreg import simreg_loss

__all__ = [
    "cpretrain_loss",
    "creg_loss",
    "mic_loss",
    "prefixes_ce_loss",
    "sce_loss",
    "sigmoid_loss",
    "sigreg_loss",
    "simcse_loss",
    "simreg_loss",
]
