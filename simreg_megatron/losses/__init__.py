# SPDX-License-Identifier: Apache-2.0
"""Training objectives on hidden states, in plain torch: no process groups, no Megatron.

`Block`, `cosine_logits`, `label_pairs`, `self_pairs`, `mean_over`, `log_sum` and `spread` are what an objective of
your own is made of (docs/objectives.md).
"""

from simreg_megatron.losses._anchored import BlockTerms, cosine_logits, log_sum, mean_over, spread
from simreg_megatron.losses._chunks import Block, label_pairs, self_pairs
from simreg_megatron.losses.baselines import cpretrain_loss, creg_loss, sce_loss
from simreg_megatron.losses.dispersion import dispersion_loss
from simreg_megatron.losses.mic import mic_loss
from simreg_megatron.losses.prefixes_ce import prefixes_ce_loss
from simreg_megatron.losses.sigmoid import sigmoid_loss
from simreg_megatron.losses.sigreg import sigreg_loss
from simreg_megatron.losses.simcse import simcse_loss
from simreg_megatron.losses.simreg import simreg_loss

__all__ = [
    "Block", "BlockTerms", "cosine_logits", "cpretrain_loss", "creg_loss", "dispersion_loss", "label_pairs",
    "log_sum", "mean_over", "mic_loss", "prefixes_ce_loss", "sce_loss", "self_pairs", "sigmoid_loss",
    "sigreg_loss", "simcse_loss", "simreg_loss", "spread",
]  # fmt: skip
