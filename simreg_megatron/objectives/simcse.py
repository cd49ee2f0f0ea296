# SPDX-License-Identifier: Apache-2.0
"""SimCSE: whole sequences against each other, a baseline."""

from simreg_megatron.objectives.record import Felt, Kind, Objective

TWICE = "it needs the model to run twice on each micro-batch, and a hook has one run: leave the option out"

SIMCSE = Objective(
    name="simcse",
    kind=Kind.SEQUENCES,
    asks="two views of a sequence closer than other sequences",
    labels="no",
    sent="sums of states of each sequence",
    temperature=0.05,
    options={"view": ("halves", "dropout"), "pooling": ("mean", "last"), "gather": ("no", "yes")},
    not_offered={("view", "forward2"): TWICE},
    takes_rows=lambda options: True,
    felt=Felt(chunk_size=None),
    invariant=("rotation", "names"),
)
