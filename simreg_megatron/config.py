# SPDX-License-Identifier: Apache-2.0
"""Every SimReg setting in one frozen record, checked when it is made."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields

from simreg_megatron.schedule import Schedule, parsed

OBJECTIVES = (
    "simreg", "simcse", "cpretrain", "creg", "sce", "sigreg", "sigmoid", "mic", "prefixes-ce", "z-loss", "placebo",
    "none",
)  # fmt: skip
SCOPES = ("exact", "local")
PLACEMENTS = ("post-norm", "pre-norm")
SIMILARITIES = ("cosine", "dot", "qnorm", "dnorm", "learnable")
GROUP_REDUCTIONS = ("sum", "mean")
SELF_POSITIVES = ("always", "only_if_alone", "never")
CHUNK_WEIGHTS = ("token", "uniform", "pos-neg-ratio", "neg-pos-ratio", "count-corrected")
ADAGC_VARIANTS = ("clipped", "raw", "global")
IMPLEMENTATIONS = ("auto", "reference", "tiled", "gemm", "triton")

TEMPERATURES = {
    "simreg": 0.01, "simcse": 0.05, "cpretrain": 0.1, "creg": 0.1, "sce": 0.1, "sigmoid": 0.1, "placebo": 0.01,
    "none": 0.01,
}  # fmt: skip
"""Temperature of each objective where none is given; others have none."""
OptionKind = tuple[str, ...] | int | float | str
OBJECTIVE_OPTIONS: dict[str, dict[str, OptionKind]] = {
    "simreg": {"prefixes": "whole"},
    "simcse": {"view": ("halves", "dropout"), "pooling": ("mean", "last"), "gather": ("no", "yes")},
    "cpretrain": {"same_label": ("masked", "kept"), "level": ("token", "sequence"), "scale": ("fixed", "learned")},
    "creg": {"form": ("per_positive", "per_pair", "supcon_out"), "self_positive": ("never", "always")},
    "sce": {
        "target": ("label", "instance"),
        "exclude_self": ("no", "yes"),
        "coupling": 0.5,
        "target_temperature": 0.07,
    },
    "sigreg": {
        "estimator": ("mean", "epps-pulley"),
        "normalize": ("sqrt-d", "unit", "none"),
        "sample": ("chunk", "micro-batch", "replicas"),
        "directions": 0,  # the estimator's own number
        "seed": 0,
    },
    "sigmoid": {
        "param": ("relative", "absolute"),
        "pair_reduction": ("anchor", "pair", "balanced"),
        "trains": ("both", "t", "bias", "none"),
        "bias": 0.0,
        "self_positive": ("never", "always"),
        "pairs": ("labels", "hidden-head"),
        "adapter": ("no", "yes"),
    },
    "mic": {
        "prefixes": "auto",
        "pool": ("chunk", "sequence", "token"),
        "norm_scope": ("sequence", "batch"),
        "threshold": 0.1,
        "t": 2.0,
        "correlation": 1.0,
        "variance": 1.0,
        "balance": 1.0,
        "uniformity": 1.0,
    },
    "prefixes-ce": {"prefixes": "auto"},
    "placebo": {"prefixes": "whole", "seed": 0},
}
"""Options of an objective's own: words to choose from, the first is the default; or a number, its default, which must
be whole and not negative where the default is; or a word in the place of whole numbers with slashes: 64/128."""
LARGEST_SCALE = 100.0
"""Of the cosines, where a scale is learned."""
_TWICE = "it needs the model to run twice on each micro-batch, and a hook has one run: leave the option out"
NOT_OFFERED = {
    ("simcse", "view", "forward2"): _TWICE,
    ("creg", "prediction_consistency", "yes"): _TWICE,
    ("sce", "keys", "ema"): "it needs a second model whose weights follow the first: leave the option out",
}
"""Options that the originals have and a plugin cannot: (objective, option, value) and why."""

_REFERENCE_HIDDEN_SIZE = 1024  # lambda = 10 was tuned at this width


@dataclass(frozen=True)
class SimRegConfig:
    """Settings of one run.

    Attributes:
        lambda_: weight of the term beside the next-token loss; "auto" is 10 * sqrt(hidden_size / 1024); 0 is off.
        temperature: tau, the divisor of the cosine; None is the objective's own, 0.01 for SimReg.
        chunk_size: tokens per chunk; 0 compares within the whole sequence.
        scope: "exact" cuts chunks on the sequence, "local" on what one rank holds.
        similarity: how two hidden states are compared.
        objective: "simreg", another one, "none" to measure SimReg, in log steps, without training on it, or "placebo",
            SimReg with labels that were moved around inside each chunk: a control. Several at once, each with its
            weight in the place of lambda: "simreg:auto,sigreg:0.05"; settings go to those that know them.
        objective_options: settings of an objective's own, as pairs or as text: "form=per_pair,self_positive=always".
            Of several objectives: "sigreg.seed=1,creg.temperature=0.2".
        layers: whose states get the term: "final" and layer numbers from 1; several are added up, lambda for each.
        placement: "post-norm" takes the final states behind the last norm (what enters the output layer), "pre-norm"
            before it. A numbered layer's output is behind no norm.
        group_reduce: "sum" or "mean" over the positive and over the negative group.
        self_positive: when a token counts as its own positive.
        chunk_weight: how the chunks of one sequence are weighed against each other.
        document_mask: tokens of different documents in one sequence never meet.
        warmup_iters: iterations over which lambda rises linearly from 0.
        lambda_schedule: "constant"; "linear:F" or "cosine:F" go from lambda to F times lambda over the training.
        off_after: share of the training after which the term is off, and not computed any more; None is never. A
            schedule then ends there.
        every: the term is computed in each step whose number (from 0) this divides, with so many times the weight:
            another objective, the same in expectation.
        impl: which implementation computes the loss.
        log_interval: iterations between SimReg's log values; None is Megatron's own interval.

    Raises:
        ValueError: a setting is impossible, or would have no effect.
    """

    lambda_: float | str = 0.0
    temperature: float | None = None
    chunk_size: int = 1024
    scope: str = "exact"
    similarity: str = "cosine"
    objective: str = "simreg"
    objective_options: tuple[tuple[str, str | float], ...] = ()
    layers: tuple[int | str, ...] = ("final",)
    placement: str = "post-norm"
    group_reduce: str = "sum"
    self_positive: str = "always"
    chunk_weight: str = "token"
    document_mask: bool = False
    warmup_iters: int = 0
    lambda_schedule: str = "constant"
    off_after: float | None = None
    every: int = 1
    impl: str = "auto"
    log_interval: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "lambda_", _checked_lambda(self.lambda_))
        object.__setattr__(self, "layers", _checked_layers(self.layers))
        if self.combines:
            object.__setattr__(self, "objective_options", _checked_together(self))
            return
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"unknown SimReg {name.replace('_', ' ')} {value!r}: choose from {', '.join(choices)}")
        object.__setattr__(self, "objective_options", _checked_options(self.objective, self.objective_options))
        if self.temperature is None:
            object.__setattr__(self, "temperature", TEMPERATURES.get(self.objective))
        elif self.objective not in TEMPERATURES:
            raise ValueError(f"SimReg objective {self.objective} has no temperature: drop it")
        if not (math.isfinite(self.tau) and self.tau > 0):
            raise ValueError(f"the SimReg temperature must be a finite number above 0, not {self.tau}")
        if self.chunk_size < 0 or self.chunk_size == 1:
            raise ValueError(
                f"the SimReg chunk size must be at least 2 tokens, or 0 for the whole sequence, not {self.chunk_size}: "
                "a token alone has nothing to be compared with"
            )
        if self.warmup_iters < 0:
            raise ValueError(f"the SimReg warm-up must be 0 or more iterations, not {self.warmup_iters}")
        if self.every < 1:
            raise ValueError(f"SimReg can be computed in every step (1) or every K-th one, not every {self.every}")
        if self.log_interval is not None and self.log_interval < 1:
            raise ValueError(f"the SimReg log interval must be 1 or more iterations, not {self.log_interval}")
        self._refuse_settings_without_effect()

    def _refuse_settings_without_effect(self) -> None:
        if self.objective == "none" and self.lambda_ != 0:
            raise ValueError(
                f"SimReg lambda {self.lambda_} has no effect with objective none, which only measures: drop one of them"
            )
        if self.objective == "none" and self.similarity == "learnable":
            raise ValueError(
                "SimReg similarity learnable has nothing to learn from with objective none: drop one of them"
            )
        if self.impl in ("tiled", "gemm", "triton") and (self.similarity, self.self_positive) != ("cosine", "always"):
            raise ValueError(
                f"SimReg impl {self.impl} knows similarity cosine and self positive always only: use impl reference, "
                "or auto"
            )
        if self.group_reduce == "mean" and self.chunk_weight == "count-corrected":
            raise ValueError(
                "SimReg chunk weight count-corrected has no effect with group reduce mean, which has no counts: "
                "drop one of them"
            )
        if not self.is_simreg:
            self._refuse_settings_of_simreg()
        if self.placement != "post-norm" and "final" not in self.layers:
            raise ValueError(
                f"SimReg placement {self.placement} has no effect on numbered layers, whose output is behind no norm: "
                "drop it, or add final to the layers"
            )
        if not (self.schedule.is_constant or self.trains):
            what = "warm-up" if self.warmup_iters else "schedule of lambda"
            raise ValueError(f"a SimReg {what} has no effect while lambda is 0: give lambda, or drop the {what}")
        if self.every > 1:
            self._refuse_rests()

    def _refuse_rests(self) -> None:
        if not self.trains:
            raise ValueError(
                f"SimReg every {self.every} steps has no effect while lambda is 0: give lambda, or drop it"
            )
        if self.trains_scalars:
            raise ValueError(
                f"SimReg every {self.every} steps leaves scalars that it trains without a gradient in the others: "
                "compute it in every step, or train none"
            )

    @property
    def _idle_settings(self) -> list[str]:
        """What has no effect on the objective, whatever it is set to."""
        if self.is_simreg:
            return []
        names = ["similarity", "group_reduce", "self_positive", "chunk_weight", "impl"]
        if self.sends_no_rows:
            names += ["scope", "document_mask"]
        if self.through_head:
            names += ["layers", "placement"]
        beyond_chunks = any(self.options.get(name, "chunk") != "chunk" for name in ("sample", "pool"))
        if self.by_sequence or self.through_head or beyond_chunks:
            names.append("chunk_size")
        return names

    def _refuse_settings_of_simreg(self) -> None:
        self._refuse_numbers_of_mic()
        if self.meets_heads and self.options["self_positive"] == "always":
            raise ValueError("self_positive=always has no effect on pairs=hidden-head, where a token meets its own row")
        if self.options.get("adapter") == "yes" and not self.meets_heads:
            raise ValueError("adapter=yes turns states away from a locked modality, so it needs pairs=hidden-head")
        if self.by_sequence and self.options.get("same_label") == "kept":
            raise ValueError("same_label=kept has no effect on level=sequence, which knows no labels: drop it")
        if self.options.get("scale") == "learned" and self.tau * LARGEST_SCALE <= 1:
            raise ValueError(
                f"scale=learned starts at 1 / temperature and grows up to {LARGEST_SCALE:g}: give a temperature above "
                f"{1 / LARGEST_SCALE:g}, not {self.tau:g}"
            )
        idle = [name for name in self._idle_settings if getattr(self, name) != _DEFAULTS[name]]
        if idle:
            raise ValueError(
                f"SimReg {idle[0].replace('_', ' ')} {as_typed(getattr(self, idle[0]))} has no effect on objective "
                f"{self.objective}: drop it"
            )

    def _refuse_numbers_of_mic(self) -> None:
        if self.objective != "mic":
            return
        numbers = {name: value for name, value in self.objective_options if isinstance(value, float)}
        below = [name for name, value in numbers.items() if value < 0]
        if below:
            raise ValueError(f"SimReg objective option {below[0]} must be 0 or more, not {numbers[below[0]]:g}")
        if not any(numbers[name] for name in ("correlation", "variance", "balance", "uniformity")):
            raise ValueError("the weights of all four parts of SimReg objective mic are 0: leave one above 0")

    @property
    def combines(self) -> bool:
        """Whether the objective names several ones with their weights; then `parts` are what is computed."""
        return ":" in self.objective or "," in self.objective

    @functools.cached_property
    def parts(self) -> tuple[SimRegConfig, ...]:
        """The settings of each objective; most often of one."""
        return _parts(self) if self.combines else (self,)

    @property
    def is_simreg(self) -> bool:
        """Whether the term is SimReg's, whatever its labels, and even if it is only measured."""
        return self.objective in ("simreg", "placebo", "none")

    @property
    def draws(self) -> bool:
        """Whether each iteration draws random numbers of its own."""
        return self.objective in ("sigreg", "placebo")

    @property
    def by_sequence(self) -> bool:
        """Whether whole sequences of a micro-batch are compared: then no chunks, labels or documents are known."""
        return self.objective == "simcse" or self.options.get("level") == "sequence"

    @property
    def sums_up(self) -> bool:
        """Whether tokens meet only in sums over a sample, so that sums travel and hidden states never do."""
        return self.objective in ("sigreg", "mic")

    @property
    def through_head(self) -> bool:
        """Whether each token has a term by itself, through the output layer: then that layer is trained, too."""
        return self.objective in ("prefixes-ce", "z-loss")

    @property
    def sends_no_rows(self) -> bool:
        """Whether hidden states stay where they are, however chunks lie over the ranks."""
        return self.by_sequence or self.sums_up or self.through_head

    @property
    def meets_heads(self) -> bool:
        """Whether hidden states are compared with rows of the output layer."""
        return self.options.get("pairs") == "hidden-head"

    @property
    def tau(self) -> float:
        """The temperature in force."""
        return TEMPERATURES.get(self.objective, 1.0) if self.temperature is None else self.temperature

    @property
    def options(self) -> dict[str, str | float | bool]:
        """Every option of the objective's own, by name."""
        return dict(self.objective_options)

    @property
    def prefixes(self) -> tuple[int, ...]:
        """How many of the first features count, each number by itself, ascending; empty: the objective's default."""
        text = str(self.options.get("prefixes", ""))
        return tuple(sorted({int(number) for number in text.split("/") if number.isdecimal()}))

    @property
    def trains_scalars(self) -> bool:
        """Whether the objective has parameters of its own."""
        of_sigmoid = self.objective == "sigmoid" and (
            self.options["trains"] in ("both", "t", "bias") or self.options["adapter"] == "yes"
        )
        return of_sigmoid or self.similarity == "learnable" or self.options.get("scale") == "learned"

    @property
    def trains(self) -> bool:
        """Whether the term adds to the gradient."""
        return self.combines or (self.objective != "none" and self.lambda_ != 0)

    @property
    def active(self) -> bool:
        """Whether anything is computed at all. False means plain Megatron, bit for bit."""
        return self.trains or self.objective == "none"

    @functools.cached_property
    def schedule(self) -> Schedule:
        """How lambda, or the weight of each objective, changes over the training."""
        return parsed(self.lambda_schedule, self.warmup_iters, self.off_after)

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """The numbered layers, from 1, ascending."""
        return tuple(layer for layer in self.layers if isinstance(layer, int))

    @property
    def looks_inside(self) -> bool:
        """Whether states inside the decoder are needed, beside what it returns."""
        return bool(self.layer_numbers) or self.placement == "pre-norm"

    def weight(self, hidden_size: int) -> float:
        """lambda as a number for a model of this width: 10 * sqrt(hidden_size / 1024) if it is "auto"."""
        if self.lambda_ == "auto":
            return 10.0 * math.sqrt(hidden_size / _REFERENCE_HIDDEN_SIZE)
        return float(self.lambda_)


_DEFAULTS = {field.name: field.default for field in fields(SimRegConfig)}


@dataclass(frozen=True)
class AdaGCConfig:
    """Settings of adaptive clipping; see `simreg_megatron.adagc.AdaGC`.

    Attributes:
        lambda_rel: how far above its moving average a parameter's gradient norm may rise.
        lambda_abs: largest global norm during the warm-up.
        beta: of the moving average.
        warmup_iters: steps that are clipped by their global norm.
        variant: "clipped", "raw" or "global".

    Raises:
        ValueError: a setting is impossible.
    """

    lambda_rel: float = 1.04
    lambda_abs: float = 1.0
    beta: float = 0.99
    warmup_iters: int = 100
    variant: str = "clipped"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lambda_rel) and self.lambda_rel > 0):
            raise ValueError(f"AdaGC's lambda-rel must be a finite number above 0, not {self.lambda_rel}")
        if not (math.isfinite(self.lambda_abs) and self.lambda_abs > 0):
            raise ValueError(f"AdaGC's lambda-abs must be a finite number above 0, not {self.lambda_abs}")
        if not 0 <= self.beta < 1:
            raise ValueError(f"AdaGC's beta must be at least 0 and below 1, not {self.beta}")
        if self.warmup_iters < 0:
            raise ValueError(f"AdaGC's warm-up must be 0 or more iterations, not {self.warmup_iters}")
        if self.variant not in ADAGC_VARIANTS:
            raise ValueError(f"unknown AdaGC variant {self.variant!r}: choose from {', '.join(ADAGC_VARIANTS)}")


_CHOICES = {
    "objective": OBJECTIVES,
    "scope": SCOPES,
    "placement": PLACEMENTS,
    "similarity": SIMILARITIES,
    "group_reduce": GROUP_REDUCTIONS,
    "self_positive": SELF_POSITIVES,
    "chunk_weight": CHUNK_WEIGHTS,
    "impl": IMPLEMENTATIONS,
}


def as_typed(value: object) -> str:
    """A setting as one would give it: options as name=value, several of anything with commas."""
    if not isinstance(value, tuple):
        return str(value)
    return ",".join("=".join(map(str, part)) if isinstance(part, tuple) else str(part) for part in value) or "none"


def _checked_lambda(value: float | str) -> float | str:
    if value == "auto":
        return "auto"
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise ValueError(
            f"SimReg lambda must be a finite number of 0 or more, or auto, not {value if str(value) else 'empty'}"
        )
    return number


def _checked_together(config: SimRegConfig) -> tuple[tuple[str, str | float], ...]:
    """The options of all parts; what they were given and no part knows is refused."""
    if config.lambda_ != 0:
        raise ValueError(
            f"SimReg lambda {config.lambda_} has no effect where each objective has a weight: "
            f"write it behind the name, as in simreg:{config.lambda_}"
        )
    for name in _DEFAULTS.keys() - {"objective", "objective_options", "temperature"}:
        if getattr(config, name) != _DEFAULTS[name] and all(name in part._idle_settings for part in config.parts):
            raise ValueError(
                f"SimReg {name.replace('_', ' ')} {as_typed(getattr(config, name))} has no effect on any of "
                f"{config.objective}: drop it"
            )
    of_head = [part.objective for part in config.parts if part.through_head]
    if config.looks_inside and of_head:
        raise ValueError(
            f"SimReg objective {of_head[0]} is of the final states, as the output layer is given them: train it "
            "without --simreg-layers and --simreg-placement"
        )
    own = [(f"{part.objective}.{name}", value) for part in config.parts for name, value in part.objective_options]
    words = [(word, str(value)) for word, value in _words(config.objective_options)]
    return (*own, *((word, float(value)) for word, value in words if word.endswith(".temperature")))


def _parts(config: SimRegConfig) -> tuple[SimRegConfig, ...]:
    weights = _weights(config.objective)
    options: dict[str, dict[str, object]] = {name: {} for name in weights}
    for word, value in _words(config.objective_options):
        objective, dot, name = word.partition(".")
        if not dot or objective not in weights:
            raise ValueError(
                f"with several SimReg objectives an option begins with the name of its own, as in "
                f"{next(iter(weights))}.{name or word}, and {word!r} does not"
            )
        options[objective][name] = value
    found = []
    for objective, weight in weights.items():
        own = options[objective]
        temperature = own.pop("temperature", _shared_temperature(config, objective, list(weights)))
        given = {"objective": objective, "lambda_": weight, "objective_options": tuple(own.items())}
        alone = SimRegConfig(**given)  # type: ignore[arg-type]
        rest = _DEFAULTS.keys() - given.keys() - {"temperature"} - set(alone._idle_settings)
        shared = {name: getattr(config, name) for name in rest}
        if temperature is not None:
            shared["temperature"] = _checked_option(f"{objective}.temperature", 1.0, temperature)
        found.append(SimRegConfig(**given, **shared))  # type: ignore[arg-type]
    return tuple(found)


def _weights(text: str) -> dict[str, float | str]:
    """ "simreg:auto,sigreg:0.05" by name."""
    found: dict[str, float | str] = {}
    for word in text.split(","):
        name, colon, weight = (piece.strip() for piece in word.partition(":"))
        if not colon or name not in OBJECTIVES or name == "none" or name in found:
            raise ValueError(
                f"SimReg objective {text!r} must be one name, or several different ones with a weight each, such as "
                f"simreg:auto,sigreg:0.05; choose from {', '.join(OBJECTIVES[:-1])}"
            )
        found[name] = _checked_lambda(weight)
        if found[name] == 0:
            raise ValueError(f"SimReg objective {name} has weight 0 in {text!r}: give it another, or leave it out")
    return found


def _shared_temperature(config: SimRegConfig, objective: str, names: list[str]) -> float | None:
    """The one temperature goes to SimReg, or to the only part that has one."""
    if config.temperature is None:
        return None
    takers = ["simreg"] if "simreg" in names else [name for name in names if name in TEMPERATURES]
    if len(takers) != 1:
        raise ValueError(
            f"SimReg temperature {config.temperature} belongs to none or to several of {config.objective}: give it "
            f"as an option of one, such as {(takers or names)[0]}.temperature={config.temperature}"
        )
    return config.temperature if objective == takers[0] else None


def _words(value: object) -> list[tuple[str, object]]:
    """Options given as pairs, or as text."""
    words = [word.partition("=")[::2] for word in value.split(",") if word] if isinstance(value, str) else value
    return [(_option_name(str(name)), setting) for name, setting in words]  # type: ignore[attr-defined]


def _option_name(word: str) -> str:
    """ "self-positive" is self_positive; the objective before a dot keeps its hyphens."""
    objective, dot, name = word.strip().rpartition(".")
    return objective + dot + name.replace("-", "_")


def _checked_options(objective: str, value: object) -> tuple[tuple[str, str | float], ...]:
    """All options of the objective, those not given at their defaults."""
    known = OBJECTIVE_OPTIONS.get(objective, {})
    given = dict(_words(value))
    for name, setting in given.items():
        if (objective, name, setting) in NOT_OFFERED:
            raise ValueError(
                f"SimReg objective {objective} has no {name}={setting}: {NOT_OFFERED[objective, name, str(setting)]}"
            )
        if name not in known:
            has = ", ".join(known) if known else "no options"
            raise ValueError(f"unknown option {name!r} of SimReg objective {objective}: it has {has}")
    return tuple((name, _checked_option(name, known[name], given.get(name))) for name in known)


def _checked_option(name: str, known: OptionKind, value: object) -> str | float:
    if isinstance(known, str):
        numbers = str(value).split("/")
        if value not in (None, known) and not all(number.isdecimal() and int(number) > 0 for number in numbers):
            raise ValueError(
                f"SimReg objective option {name} must be {known}, or whole numbers from 1 such as 64/128, not {value!r}"
            )
        return known if value is None else str(value)
    if isinstance(known, tuple):
        if value is not None and value not in known:
            raise ValueError(f"SimReg objective option {name} must be one of {', '.join(known)}, not {value!r}")
        return known[0] if value is None else str(value)
    try:
        number = known if value is None else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"SimReg objective option {name} must be a number, not {value!r}")
    if isinstance(known, int):
        if number < 0 or number != int(number):
            raise ValueError(f"SimReg objective option {name} must be a whole number of 0 or more, not {value!r}")
        return int(number)
    return number


def _checked_layers(value: object) -> tuple[int | str, ...]:
    """("final",), (3, "final"), or the same as text: "3,final". Numbers first, each once, ascending."""
    words = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else (value,)
    numbers, final = set(), False
    for word in words:
        text = str(word).strip()
        if text == "final":
            final = True
        elif text.isdecimal() and int(text) > 0:
            numbers.add(int(text))
        else:
            raise ValueError(f"SimReg layers must be final, or layer numbers from 1 such as 12,24,final; not {text!r}")
    return (*sorted(numbers), *(("final",) if final else ()))
