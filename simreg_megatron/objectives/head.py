# SPDX-License-Identifier: Apache-2.0
"""Losses of single tokens through the output layer, which they train, too."""

from simreg_megatron.objectives.record import Felt, Kind, Objective

PREFIXES_CE = Objective(
    name="prefixes-ce",
    kind=Kind.HEAD,
    asks="first features that predict the next token by themselves",
    sent="prefixes of states, where sequence parallelism splits them",
    options={"prefixes": "auto"},
    prefixes_below_width=True,  # all features are what the language-model loss itself has
    felt=Felt(weight=0.5, options="prefixes=8/32", chunk_size=None),
)
Z_LOSS = Objective(
    name="z-loss",
    kind=Kind.HEAD,
    asks="normalizers of the logits near 0",
    labels="no",
    sent="as with `prefixes-ce`",
    felt=Felt(weight=0.05, chunk_size=None),
)
