# SPDX-License-Identifier: Apache-2.0
"""The objectives of this package: SimReg (arXiv 2605.08809), its controls, its baselines and its rivals."""

from __future__ import annotations

import math

from simreg_megatron.objectives.record import ExampleSettings, Kind, Objective, Options, Scalar

GROUP_REDUCTIONS = ("sum", "mean")
FORMS = ("triton", "tiled")  # of SimReg: the fast ones
IMPLEMENTATIONS = ("auto", "reference", *reversed(FORMS))
SELF_POSITIVES = ("always", "only_if_alone", "never")
CHUNK_WEIGHTS = ("token", "uniform", "pos-neg-ratio", "neg-pos-ratio", "count-corrected")

_TEMPERATURE = 0.01
_TUNED_WIDTH = 1024  # of the authors, with lambda 10


def authors_lambda(hidden_size: int) -> float:
    """Return the authors' lambda for a model of this width: 10 * sqrt(hidden_size / 1024)."""
    return 10.0 * math.sqrt(hidden_size / _TUNED_WIDTH)


def note_on_lambda(objective: str, given: float | str, hidden_size: int) -> str:
    """Warn of `auto` for an objective that it is not made for, and of a lambda above twice the authors' for this width:
    10, theirs at 1024, harms a tiny model."""
    if given == "auto":
        fits = objective in ("simreg", "placebo")
        return "" if fits else f"lambda auto is the rule for simreg and says nothing about {objective}: give a number"
    usual = authors_lambda(hidden_size)
    if objective != "simreg" or float(given) <= 2 * usual:
        return ""
    return f"lambda {given:g} is large for width {hidden_size}, where the authors' rule (auto) gives {usual:.1f}"


def _warn_of_placebo(options: Options) -> str:
    if options["labels"] == "none":
        return "no labels are used; this is a control"
    return "labels are moved around inside each chunk; this is a control and should not help"


SIMREG = Objective(
    name="simreg", kind=Kind.SIMREG, temperature=_TEMPERATURE,
    asks="states of one label closer than all others, by a softmax",
    options={"prefixes": "whole"}, invariant=("scale", "rotation", "names", "order"),
)  # fmt: skip
PLACEBO = Objective(
    name="placebo", kind=Kind.SIMREG, temperature=_TEMPERATURE,
    asks="SimReg with labels moved around inside each chunk: a control",
    options={"prefixes": "whole", "labels": ("permuted", "none"), "seed": 0}, idle_with={"seed": ("labels", "none")},
    warning=_warn_of_placebo, draws=True, relabels=True, invariant=("scale", "rotation", "names"),
)  # fmt: skip
NONE = Objective(
    name="none", kind=Kind.SIMREG, temperature=_TEMPERATURE, trains=False,
    asks="nothing: SimReg is measured in log steps, and not trained on",
    example=ExampleSettings(weight=0.0), invariant=("scale", "rotation", "names", "order"),
)  # fmt: skip

TWICE = "it needs the model to run twice on each micro-batch, and a hook has one run: leave the option out"

SIMCSE = Objective(
    name="simcse", kind=Kind.SEQUENCES, temperature=0.05,
    asks="two views of a sequence closer than other sequences", labels="no", sent="sums of states of each sequence",
    options={"view": ("halves", "dropout"), "pooling": ("mean", "last"), "gather": ("no", "yes")},
    not_offered={("view", "forward2"): TWICE},
    takes_rows=lambda options: True,
    example=ExampleSettings(chunk_size=None), invariant=("rotation", "names"),
)  # fmt: skip


LARGEST_SCALE = 100.0  # upper limit of a learned scale of the cosines


def _check_cpretrain(options: Options, temperature: float, _: int) -> None:
    if options["scale"] == "learned" and temperature * LARGEST_SCALE <= 1:
        raise ValueError(
            f"scale=learned starts at 1 / temperature and grows up to {LARGEST_SCALE:g}: give a temperature above "
            f"{1 / LARGEST_SCALE:g}, not {temperature:g}"
        )


def _scalars_of_cpretrain(options: Options, temperature: float) -> dict[str, Scalar]:
    if options["scale"] != "learned":
        return {}
    return {"log_scale": Scalar(-math.log(temperature), "simreg scale", "exp", most=LARGEST_SCALE)}


CPRETRAIN = Objective(
    name="cpretrain", kind=Kind.PAIRS, temperature=0.1,
    kind_of=lambda options: Kind.SEQUENCES if options["level"] == "sequence" else Kind.PAIRS,
    asks="each token closer to the next of its label than to those of other pairs",
    options={"same_label": ("masked", "kept"), "level": ("token", "sequence"), "scale": ("fixed", "learned")},
    idle_with={"same_label": ("level", "sequence")}, other_options=("level", "scale"),
    check=_check_cpretrain, scalars=_scalars_of_cpretrain,
    takes_rows=lambda options: options["level"] == "sequence",
    invariant=("scale", "rotation", "names"),
)  # fmt: skip


PER_PAIR_TOKENS = 256  # longest chunk of form "per_pair", which holds chunk^3 numbers


def _check_creg(options: Options, _: float, chunk_size: int) -> None:
    if options["form"] == "per_pair" and not 0 < chunk_size <= PER_PAIR_TOKENS:
        raise ValueError(
            f"SimReg objective option form=per_pair holds chunk^3 numbers: give a chunk size of at most "
            f"{PER_PAIR_TOKENS}, not {chunk_size or '0, the whole sequence'}"
        )


CREG = Objective(
    name="creg", kind=Kind.PAIRS, temperature=0.1,
    asks="each state of a label closer than all of other labels",
    options={"form": ("per_positive", "per_pair", "supcon_out"), "self_positive": ("never", "always")},
    check=_check_creg, not_offered={("prediction_consistency", "yes"): TWICE},
    invariant=("scale", "rotation", "names", "order"),
)  # fmt: skip
SCE = Objective(
    name="sce", kind=Kind.PAIRS, temperature=0.1,
    asks="similarities like a mixture of the labels' and the states' own",
    options={
        "target": ("label", "instance"), "exclude_self": ("no", "yes"), "coupling": 0.5, "target_temperature": 0.07,
    },
    limits={"coupling": (0, 1), "target_temperature": (1e-4, 1e4)},
    idle_with={"target_temperature": ("coupling", 1), "target": ("coupling", 0)},
    excludes={("exclude_self=yes", "target=instance"):
              "exclude_self=yes leaves target=instance without its only entry: use target=label"},
    not_offered={("keys", "ema"): "it needs a second model whose weights follow the first: leave the option out"},
    invariant=("scale", "rotation", "names", "order"),
)  # fmt: skip


UNSCALED = (
    "normalize=unit leaves projections of variance 1/d, whose characteristic function is near 1 for all states "
    "do: the loss hardly separates an even spread from a collapse, and descends towards the latter; use sqrt-d"
)


def _by_chunk(options: Options) -> bool:
    return options["sample"] == "chunk"


SIGREG = Objective(
    name="sigreg", kind=Kind.SUMS,
    asks="an isotropic Gaussian, seen through random directions", labels="no",
    sent="2 x knots x directions numbers a sample",
    options={
        "estimator": ("mean", "epps-pulley"), "normalize": ("sqrt-d", "unit", "none"),
        "sample": ("chunk", "micro-batch", "replicas"), "directions": 0, "seed": 0,  # directions: 0 is the estimator's
    },
    limits={"directions": (0, 65_536)},  # each is as wide as a state
    warning=lambda options: UNSCALED if options["normalize"] == "unit" else None,
    draws=True, has_chunks=_by_chunk, takes_rows=_by_chunk,
    example=ExampleSettings(weight=0.3), invariant=("scale", "names", "order"),
)  # fmt: skip


_SIGMOID_SCALARS = {"both": ("log_t", "bias"), "t": ("log_t",), "bias": ("bias",), "none": ()}
_SIGMOID_DELTA = 0.5  # delta = sigmoid(0.5), where the source begins


def _scalars_of_sigmoid(options: Options, temperature: float) -> dict[str, Scalar]:
    known = {
        "log_t": Scalar(-math.log(temperature), "sigmoid t", "exp"),
        "bias": Scalar(float(options["bias"]), "sigmoid bias"),
        "adapter": Scalar(_SIGMOID_DELTA, "sigmoid delta", "sigmoid"),
    }
    names = _SIGMOID_SCALARS[str(options["trains"])] + (("adapter",) if options["adapter"] == "yes" else ())
    return {name: known[name] for name in names}


SIGMOID = Objective(
    name="sigmoid", kind=Kind.PAIRS, temperature=0.1,
    asks="each pair on its side of one threshold",
    options={
        "param": ("relative", "absolute"), "pair_reduction": ("anchor", "pair", "balanced"),
        "trains": ("both", "t", "bias", "none"), "bias": 0.0, "self_positive": ("never", "always"),
        "pairs": ("labels", "hidden-head"), "adapter": ("no", "yes"),
    },
    idle_with={"self_positive": ("pairs", "hidden-head")},  # where a token meets its own row in any case
    excludes={("adapter=yes", "pairs=labels"):
              "adapter=yes turns states away from a locked modality, so it needs pairs=hidden-head"},
    other_options=("trains", "pairs", "adapter"), scalars=_scalars_of_sigmoid,
    meets_heads=lambda options: options["pairs"] == "hidden-head",
    example=ExampleSettings(weight=0.1, options="pair_reduction=balanced,trains=none"),
    invariant=("scale", "rotation", "names", "order"),
)  # fmt: skip


_MIC_PARTS = ("correlation", "variance", "balance", "uniformity")

MIC = Objective(
    name="mic", kind=Kind.SUMS,
    asks="first features that do not repeat the others, and are spread", labels="no",
    sent="means, deviations, and a matrix of correlations",
    options={
        "prefixes": "auto", "pool": ("chunk", "sequence", "token"), "norm_scope": ("sequence", "batch"),
        "threshold": 0.1, "t": 2.0, **dict.fromkeys(_MIC_PARTS, 1.0),
    },
    limits=dict.fromkeys(("threshold", "t", *_MIC_PARTS), (0, math.inf)),
    idle_with={
        "threshold": ("correlation", 0), "t": ("uniformity", 0),
        "norm_scope": ("correlation variance", 0), "pool": ("balance uniformity", 0),
    },
    excludes={tuple(f"{part}=0.0" for part in _MIC_PARTS):
              "the weights of all four parts of SimReg objective mic are 0: leave one above 0"},
    has_chunks=lambda options: options["pool"] == "chunk", takes_rows=lambda options: True,
    prefixes_below_width=True,  # it compares with the rest
    example=ExampleSettings(weight=0.02), invariant=("names", "order"),
)  # fmt: skip
DISPERSION = Objective(
    name="dispersion", kind=Kind.SUMS, temperature=1.0,
    asks="pairs of tokens at wide angles", labels="no", sent="states of the sampled tokens",
    options={"tokens": 256, "clamp": 0.0, "seed": 0},
    limits={"tokens": (2, math.inf), "clamp": (0, 0.99)},
    draws=True, has_chunks=lambda options: False, takes_rows=lambda options: True,
    example=ExampleSettings(options="tokens=8", chunk_size=None), invariant=("scale", "rotation", "names"),
)  # fmt: skip
PREFIXES_CE = Objective(
    name="prefixes-ce", kind=Kind.HEAD,
    asks="first features that predict the next token by themselves",
    sent="prefixes of states, where sequence parallelism splits them",
    options={"prefixes": "auto"},
    prefixes_below_width=True,  # all features are what the language-model loss itself has
    example=ExampleSettings(weight=0.5, options="prefixes=8/32", chunk_size=None),
)  # fmt: skip
Z_LOSS = Objective(
    name="z-loss", kind=Kind.HEAD,
    asks="normalizers of the logits near 0", labels="no", sent="as with `prefixes-ce`",
    example=ExampleSettings(weight=0.05, chunk_size=None),
)  # fmt: skip

OBJECTIVES = (
    SIMREG, SIMCSE, CPRETRAIN, CREG, SCE, SIGREG, SIGMOID, MIC, DISPERSION, PREFIXES_CE, Z_LOSS, PLACEBO, NONE,
)  # fmt: skip
