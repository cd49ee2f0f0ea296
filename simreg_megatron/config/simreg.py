# SPDX-License-Identifier: Apache-2.0
"""Every SimReg setting in one frozen record, checked when it is made."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from simreg_megatron import objectives
from simreg_megatron.config import values
from simreg_megatron.config.schedule import Schedule, parsed
from simreg_megatron.notices import refuse
from simreg_megatron.objectives.record import STAY, Kind, Objective, Scalar, checked_options


@dataclass(frozen=True)
class SimRegConfig:
    """Settings of one run; ValueError if one is impossible, or would have no effect.

    Attributes:
        lambda_: weight of the term relative to the next-token loss; "auto" is 10 * sqrt(hidden_size / 1024); 0 is off.
        temperature: tau, the divisor of the cosine; None is the objective's own, 0.01 for SimReg.
        chunk_size: tokens per chunk; 0 compares within the whole sequence.
        scope: "exact" cuts chunks on the sequence, "local" on what one rank holds.
        similarity: how two hidden states are compared.
        objective: "simreg" or another objective; "none" measures SimReg in log steps without training on it; "placebo"
            is a control, SimReg with the labels shuffled inside each chunk. Several at once, each with its own weight
            instead of lambda: "simreg:auto,sigreg:0.05"; each takes the settings that apply to it.
        objective_options: the objective's own settings, as pairs or as text: "form=supcon_out,self_positive=never".
            With several objectives: "sigreg.seed=1,creg.temperature=0.2".
        layers: whose outputs get the term: "final" and layer numbers from 1; the terms are added, each times lambda.
        placement: take the final states after the last norm ("post-norm") or before it ("pre-norm").
        group_reduce: "sum" or "mean" over a token's positives, and over its negatives.
        self_positive: when a token counts as its own positive.
        chunk_weight: how the chunks of a sequence are weighted.
        document_mask: tokens of different documents in a sequence are never compared.
        start_iter: iterations before the term begins; warm-up and schedule count from there.
        warmup_iters: iterations over which lambda rises linearly, from lambda / warmup_iters in the first one.
        lambda_schedule: "constant"; "linear:F" or "cosine:F" go from lambda to F times lambda over the training.
        off_after: share of the training after which the term is off, and a lambda_schedule ends; None is never.
        every: the term is computed only in steps whose number (from 0) is a multiple of this, with the weight times
            this: not the same objective, but equal in expectation where no gradient is clipped.
        impl: which implementation computes the loss.
        log_interval: iterations between log values, in the loops of Megatron and Megatron-Bridge; None is their own.
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
    start_iter: int = 0
    warmup_iters: int = 0
    lambda_schedule: str = "constant"
    off_after: float | None = None
    every: int = 1
    impl: str = "auto"
    log_interval: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "lambda_", values.checked_lambda(self.lambda_))
        object.__setattr__(self, "layers", values.checked_layers(self.layers))
        values.refuse_other_types("SimReg", self)
        if self.combines:
            options = values.checked_together(self._given, _DEFAULTS, self.parts)
            object.__setattr__(self, "objective_options", options)
            return
        record = self.record  # an unknown name ends here
        refuse(
            *((getattr(self, name) not in choices,
               f"unknown SimReg {name.replace('_', ' ')} {getattr(self, name)!r}: choose from {', '.join(choices)}")
              for name, choices in CHOICES.items())
        )  # fmt: skip
        object.__setattr__(self, "objective_options", checked_options(record, self.objective_options))
        if self.temperature is None:
            object.__setattr__(self, "temperature", record.temperature)
        given, (lowest, highest) = self._given, values.TEMPERATURES
        refuse(
            (record.temperature is None and self.temperature is not None,
             f"SimReg objective {self.objective} has no temperature: drop the temperature"),
            (not lowest <= self.tau <= highest,
             f"the SimReg temperature must be a number from {lowest:g} to {highest:g}, not {self.tau}"),
            *((given[name] is not None and given[name] < least,
               f"SimReg {name.replace('_', ' ')} must be {least} or more, not {given[name]}")
              for name, least in {"start_iter": 0, "every": 1, "log_interval": 1}.items()),
            *((given[name] < 0 or given[name] == 1,  # a token alone meets no other; a ramp of one step is none
               f"SimReg {name.replace('_', ' ')} must be 0, or 2 or more, not {given[name]}")
              for name in ("chunk_size", "warmup_iters")),
            (not record.trains and (self.lambda_ != 0 or self.similarity == "learnable"),
             f"SimReg {f'lambda {self.lambda_}' if self.lambda_ != 0 else 'similarity learnable'} has no effect with "
             f"objective {self.objective}, which only measures: drop one of them"),
        )  # fmt: skip
        record.check(self.options, self.tau, self.chunk_size)
        self.schedule  # noqa: B018  is checked when it is made
        refuse(
            (self.impl in ("tiled", "triton") and (self.similarity, self.self_positive) != ("cosine", "always"),
             f"SimReg impl {self.impl} supports only similarity cosine with self positive always: use impl "
             "reference, or auto"),
            (self.group_reduce == "mean" and self.chunk_weight == "count-corrected",
             "SimReg chunk weight count-corrected has no effect with group reduce mean, which has no counts: "
             "drop one of them"),
            (self.chunk_weight != "token" and self.chunk_size == 0 and self.is_simreg,
             f"SimReg chunk weight {self.chunk_weight} has no effect with chunk size 0, as nothing is cut into "
             "chunks: give a chunk size, or drop the weight"),
            *((given[name] != _DEFAULTS[name],
               f"{values.describe(name, given[name])} has no effect on objective {self.objective}: drop it")
              for name in self.idle_settings),
            (self.placement != "post-norm" and "final" not in self.layers,
             f"SimReg placement {self.placement} has no effect on numbered layers, whose output no norm follows: "
             "drop it, or add final to the layers"),
            *((given[name] != _DEFAULTS[name] and not self.trains,
               f"SimReg {name.replace('_', ' ')} has no effect while lambda is 0 or with objective none: drop it")
              for name in ("every", "start_iter", "warmup_iters", "off_after", "lambda_schedule")),
            (self.every > 1 and self.trains_scalars,
             f"SimReg every {self.every} steps leaves scalars that it trains without a gradient in the other steps: "
             "compute it in every step, or choose settings that train no scalars"),
        )  # fmt: skip

    @property
    def _given(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _DEFAULTS}

    def __getstate__(self) -> dict[str, Any]:  # without what is cached, which may hold functions
        return self._given

    @property
    def idle_settings(self) -> list[str]:
        """Settings that have no effect on the objective."""
        return self.record.idle_settings(self.options)

    @functools.cached_property
    def has_chunks(self) -> bool:
        """Return whether the objective compares the tokens of a chunk."""
        return self.record.compares_in_chunks(self.options)

    @functools.cached_property
    def combines(self) -> bool:
        """Return whether the objective names several ones with their weights; then `parts` are what is computed."""
        return ":" in self.objective or "," in self.objective

    @functools.cached_property
    def parts(self) -> tuple[SimRegConfig, ...]:
        """The settings of each objective; most often of one."""
        if not self.combines:
            return (self,)
        return tuple(SimRegConfig(**given) for given in values.settings_of_parts(self._given, _DEFAULTS))

    @functools.cached_property
    def record(self) -> Objective:
        """The record of the (single) objective."""
        return objectives.find(self.objective)

    @functools.cached_property
    def _kind(self) -> Kind | None:
        return None if self.combines else self.record.kind_with(self.options)

    @functools.cached_property
    def is_simreg(self) -> bool:
        """Return whether the term is SimReg's, with any labels, and also if it is only measured."""
        return self._kind is Kind.SIMREG

    @property
    def by_sequence(self) -> bool:
        """Return whether whole sequences are compared, which have no chunks, labels or documents."""
        return self._kind is Kind.SEQUENCES

    @functools.cached_property
    def through_head(self) -> bool:
        """Return whether each token has its own term, through the output layer: then that layer is trained, too."""
        return self._kind is Kind.HEAD

    @functools.cached_property
    def sends_no_rows(self) -> bool:
        """Return whether hidden states stay where they are, however chunks lie over the ranks."""
        return self._kind in STAY

    @functools.cached_property
    def meets_output_rows(self) -> bool:
        """Return whether hidden states are compared with rows of the output layer."""
        return self.record.meets_output_rows(self.options)

    @functools.cached_property
    def tau(self) -> float:
        """The temperature in force."""
        return 1.0 if self.temperature is None else self.temperature

    @functools.cached_property
    def options(self) -> dict[str, str | float | bool]:
        """The objective's own options, by name."""
        return dict(self.objective_options)

    @functools.cached_property
    def prefixes(self) -> tuple[int, ...]:
        """Prefix lengths, in features, ascending; empty: the objective's default."""
        text = str(self.options.get("prefixes", ""))
        return tuple(sorted({int(number) for number in text.split("/") if number.isdecimal()}))

    @functools.cached_property
    def trains_scalars(self) -> bool:
        """Return whether the objective has parameters of its own."""
        return self.similarity == "learnable" or bool(self.scalars)

    @property
    def scalars(self) -> Mapping[str, Scalar]:
        """The parameters of the objective itself, by name."""
        return self.record.scalars(self.options, self.tau)

    @functools.cached_property
    def trains(self) -> bool:
        """Return whether the term adds to the gradient."""
        return self.combines or (self.record.trains and self.lambda_ != 0)

    @functools.cached_property
    def active(self) -> bool:
        """Return whether anything is computed at all. False means plain Megatron, bit for bit."""
        return self.trains or not self.record.trains

    @functools.cached_property
    def schedule(self) -> Schedule:
        """The schedule of lambda, or of the weight of each objective, over the training."""
        return parsed(self.lambda_schedule, self.warmup_iters, self.off_after, self.start_iter)

    @functools.cached_property
    def layer_numbers(self) -> tuple[int, ...]:
        """The numbered layers, from 1, ascending."""
        return tuple(layer for layer in self.layers if isinstance(layer, int))

    @functools.cached_property
    def looks_inside(self) -> bool:
        """Return whether states inside the decoder are needed, in addition to its output."""
        return bool(self.layer_numbers) or self.placement == "pre-norm"

    def weight(self, hidden_size: int) -> float:
        """lambda as a number for a model of this width, that of the authors' rule if it is "auto"."""
        return objectives.authors_lambda(hidden_size) if self.lambda_ == "auto" else float(self.lambda_)


_DEFAULTS = {field.name: field.default for field in fields(SimRegConfig)}
CHOICES = {
    "scope": ("exact", "local"), "placement": ("post-norm", "pre-norm"), "impl": objectives.IMPLEMENTATIONS,
    "similarity": ("cosine", "dot", "qnorm", "dnorm", "learnable"), "group_reduce": objectives.GROUP_REDUCTIONS,
    "self_positive": objectives.SELF_POSITIVES, "chunk_weight": objectives.CHUNK_WEIGHTS,
}  # fmt: skip
