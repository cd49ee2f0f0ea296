# SPDX-License-Identifier: Apache-2.0
"""CReg: every positive by itself against all negatives, a baseline."""

from simreg_megatron.objectives.record import Kind, Objective
from simreg_megatron.objectives.simcse import TWICE

CREG = Objective(
    name="creg",
    ways={Kind.PAIRS: "simreg_megatron.losses.creg:creg_terms"},
    asks="each state of a label closer than all of other labels",
    temperature=0.1,
    options={"form": ("per_positive", "per_pair", "supcon_out"), "self_positive": ("never", "always")},
    not_offered={("prediction_consistency", "yes"): TWICE},
    invariant=("scale", "rotation", "names", "order"),
)
