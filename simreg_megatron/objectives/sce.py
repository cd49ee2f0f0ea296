# SPDX-License-Identifier: Apache-2.0
"""SCE: soft targets between the label's and those of the states themselves, a baseline."""

from __future__ import annotations

from simreg_megatron.objectives.record import Kind, Objective, Options


def _check(options: Options, *_: float) -> None:
    if options["exclude_self"] == "yes" and options["target"] == "instance":
        raise ValueError("exclude_self=yes leaves target=instance without its only entry: use target=label")


SCE = Objective(
    name="sce",
    kind=Kind.PAIRS,
    asks="similarities like a mixture of the labels' and the states' own",
    temperature=0.1,
    options={
        "target": ("label", "instance"),
        "exclude_self": ("no", "yes"),
        "coupling": 0.5,
        "target_temperature": 0.07,
    },
    limits={"coupling": (0, 1), "target_temperature": (1e-4, 1e4)},
    idle_with={"target_temperature": ("coupling", 1), "target": ("coupling", 0)},
    check=_check,
    not_offered={("keys", "ema"): "it needs a second model whose weights follow the first: leave the option out"},
    invariant=("scale", "rotation", "names", "order"),
)
