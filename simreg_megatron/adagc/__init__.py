# SPDX-License-Identifier: Apache-2.0
"""AdaGC: the rule (adagc), the gradients of Megatron's optimizers (gradients), and both together (clipping)."""

from simreg_megatron.adagc.adagc import AdaGC, Clipped

__all__ = ["AdaGC", "Clipped"]
