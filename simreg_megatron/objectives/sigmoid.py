# SPDX-License-Identifier: Apache-2.0
"""Sigmoid: each pair on its side of one threshold, which may be trained."""

from __future__ import annotations

import math

from simreg_megatron.objectives.record import Felt, Kind, Objective, Options, Scalar

_TRAINED = {"both": ("log_t", "bias"), "t": ("log_t",), "bias": ("bias",), "none": ()}
_ADAPTER = 0.5  # delta = sigmoid(0.5), where the source begins


def _meets_heads(options: Options) -> bool:
    return options["pairs"] == "hidden-head"


def _check(options: Options, *_: float) -> None:
    if options["adapter"] == "yes" and not _meets_heads(options):
        raise ValueError("adapter=yes turns states away from a locked modality, so it needs pairs=hidden-head")


def _scalars(options: Options, temperature: float) -> dict[str, Scalar]:
    known = {
        "log_t": Scalar(-math.log(temperature), "sigmoid t", "exp"),
        "bias": Scalar(float(options["bias"]), "sigmoid bias"),
        "adapter": Scalar(_ADAPTER, "sigmoid delta", "sigmoid"),
    }
    names = _TRAINED[str(options["trains"])] + (("adapter",) if options["adapter"] == "yes" else ())
    return {name: known[name] for name in names}


SIGMOID = Objective(
    name="sigmoid",
    kind=Kind.PAIRS,
    asks="each pair on its side of one threshold",
    temperature=0.1,
    options={
        "param": ("relative", "absolute"),
        "pair_reduction": ("anchor", "pair", "balanced"),
        "trains": ("both", "t", "bias", "none"),
        "bias": 0.0,
        "self_positive": ("never", "always"),
        "pairs": ("labels", "hidden-head"),
        "adapter": ("no", "yes"),
    },
    idle_with={"self_positive": ("pairs", "hidden-head")},  # where a token meets its own row in any case
    other_options=("trains", "pairs", "adapter"),
    check=_check,
    scalars=_scalars,
    meets_heads=_meets_heads,
    felt=Felt(weight=0.1, options="pair_reduction=balanced,trains=none"),
    invariant=("scale", "rotation", "names", "order"),
)
