# SPDX-License-Identifier: Apache-2.0
"""SimReg's loss and the geometry of hidden states, in plain torch: no process groups, no Megatron.

`Block`, `cosine_logits`, `label_pairs`, `self_pairs`, `mean_over`, `log_sum` and `spread` are what an objective of
your own is made of (docs/objectives.md).
"""

import importlib
from typing import Any

from simreg_megatron.losses._anchored import BlockTerms, cosine_logits, log_sum, mean_over, spread
from simreg_megatron.losses._chunks import Block, label_pairs, self_pairs
from simreg_megatron.losses.simreg import simreg_loss

__all__ = [
    "Block", "BlockTerms", "cosine_logits", "label_pairs", "log_sum", "mean_over", "self_pairs", "simreg_loss",
    "spread",
]  # fmt: skip
_ELSEWHERE = {"creg": "baselines", "sce": "baselines"}
_ELSEWHERE |= {name: name for name in ("cpretrain", "dispersion", "mic", "prefixes_ce", "sigmoid", "sigreg", "simcse")}


def __getattr__(name: str) -> Any:
    """Import a loss of `simreg_megatron.contrib`, such as `creg_loss`, where it is asked for under this package."""
    module = _ELSEWHERE.get(name.removesuffix("_loss"))
    if module is None or not name.endswith("_loss"):
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(f"simreg_megatron.contrib.{module}"), name)
