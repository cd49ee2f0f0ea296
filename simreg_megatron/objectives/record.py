# SPDX-License-Identifier: Apache-2.0
"""The record of an objective, which flags, refusals, log, docs and tests follow, and the check of its options."""

from __future__ import annotations

import enum
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Pairs = tuple[tuple[str, str | float], ...]
OptionKind = tuple[str, ...] | int | float | str
"""A tuple of words to choose from, the default first, of which the terms are given the chosen one (True or False where
they are "yes" and "no"); or the default number: an int takes whole numbers from 0 only, a float any number; or a
default word that stands for whole numbers with slashes, such as 64/128."""
Options = Mapping[str, str | float | bool]


class Kind(enum.Enum):
    """The things that an objective compares: decides what ranks exchange, which settings apply, how to call `terms`.

    The signature of `terms` is given below each kind; B micro-batch, A anchors of this rank:
    """

    SIMREG = "chunks, with every setting of SimReg"
    """SimReg itself; `terms` is never called."""
    PAIRS = "chunks"
    """terms(*, temperature, **options) -> BlockTerms of `simreg_megatron.losses`: the terms of a block of chunks."""
    SEQUENCES = "whole sequences of a micro-batch"
    """terms(config, views, shard, learned, replicas) -> [B, A]; see `contrib.shared`."""
    SUMS = "sums over a sample"
    """terms(config, views, shard, iteration, replicas) -> [B, A]; see `contrib.shared`."""
    HEAD = "the output layer"
    """terms(config, model, hidden_states, labels, valid, shard) -> [B, A]; see `contrib.prefixes_ce.head_terms`."""


STAY = (Kind.SEQUENCES, Kind.SUMS, Kind.HEAD)
"""Kinds that never exchange hidden states, however chunks lie over the ranks."""


@dataclass(frozen=True)
class Scalar:
    """A number that an objective trains: where it starts, and what the log shows of it."""

    start: float
    shown_as: str
    by: str = ""
    """"exp", "sigmoid", or the number itself."""
    most: float = math.inf
    """Upper limit of the value in the log."""


@dataclass(frozen=True)
class ExampleSettings:
    """Settings under which the objective changes the gradient of a small model, for the tests of every objective."""

    weight: float = 10.0
    options: str = ""
    chunk_size: int | None = 24


@dataclass(frozen=True, eq=False)
class Objective:
    """The record of an objective.

    Attributes:
        name: in `--simreg-objective`, and before " loss" in the log.
        kind: what it compares.
        kind_of: which kind the options choose, where they choose one.
        asks, labels, sent: its row in docs/objectives.md: what it asks of the states, whether it uses labels, and what
            travels between ranks that share a sequence.
        temperature: the default, or None if it has none.
        options: by name, the default first; see `OptionKind`.
        limits: the least and the most that an option may be, for numbers that have both or one of them.
        idle_with: by name of an option, the values of other ones with which it has no effect.
        excludes: what is wrong with some choices together, such as ("exclude_self=yes", "target=instance").
        other_options: options that only the plugin reads; they are not passed to the terms.
        terms: computes its terms, see `Kind`; None for SimReg.
        check: (options, temperature, chunk size); raises ValueError for settings that contradict each other.
        scalars: (options, temperature); the parameters that it trains itself, by name.
        warning: (options); a warning for the start of the run, or None.
        trains: whether it adds to the gradient at all.
        draws: whether each iteration draws random numbers of its own.
        relabels: (config, labels [B, n], usable, documents or None, tokens of a sequence, iteration); for SimReg on
            other labels, these.
        meets_output_rows: whether states are compared with rows of the output layer.
        has_chunks: whether the chunk size has an effect.
        takes_rows: whether it takes a row of the micro-batch for one sequence, so that none may be packed.
        prefixes_below_width: whether a prefix must be shorter than the states.
        example: settings for tests.
        oracle: for tests: a function of (rows [n, D], labels [n], temperature) in float64, the definition in plain
            loops: what the terms of a chunk of these tokens add up to, with the settings of `example`.
        invariant: what may be done to the states of a chunk without a change: "scale" of each, "rotation" of all,
            "names" of labels, "order" of tokens.
    """

    name: str
    kind: Kind
    asks: str
    labels: str = "yes"
    sent: str = "states, where a chunk spans ranks"
    kind_of: Callable[[Options], Kind] | None = None
    temperature: float | None = None
    options: Mapping[str, OptionKind] = field(default_factory=dict)
    limits: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    idle_with: Mapping[str, Mapping[str, str | float]] = field(default_factory=dict)
    excludes: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    other_options: tuple[str, ...] = ()
    terms: Callable[..., Any] | None = None
    check: Callable[[Options, float, int], None] = lambda options, temperature, chunk_size: None
    scalars: Callable[[Options, float], Mapping[str, Scalar]] = lambda options, temperature: {}
    warning: Callable[[Options], str | None] = lambda options: None
    trains: bool = True
    draws: bool = False
    relabels: Callable[..., Any] | None = None
    meets_output_rows: Callable[[Options], bool] = lambda options: False
    has_chunks: Callable[[Options], bool] = lambda options: True
    takes_rows: Callable[[Options], bool] = lambda options: False
    prefixes_below_width: bool = False
    example: ExampleSettings = ExampleSettings()
    oracle: Callable[..., Any] | None = None
    invariant: tuple[str, ...] = ()

    def kind_with(self, options: Options) -> Kind:
        return self.kind if self.kind_of is None else self.kind_of(options)

    def compares_in_chunks(self, options: Options) -> bool:
        """Return whether the chunk size has an effect."""
        kind = self.kind_with(options)
        return kind is Kind.SIMREG or (kind not in (Kind.SEQUENCES, Kind.HEAD) and self.has_chunks(options))

    def idle_settings(self, options: Options) -> list[str]:
        """Return the names of the settings that have no effect on the objective."""
        kind = self.kind_with(options)
        if kind is Kind.SIMREG:  # without labels each token is its only positive
            return ["self_positive"] if options.get("labels") == "none" else []
        names = ["similarity", "group_reduce", "self_positive", "chunk_weight", "impl"]
        if kind in STAY:
            names += ["scope", "document_mask"]
        if kind is Kind.HEAD:
            names += ["layers", "placement"]
        return names if self.compares_in_chunks(options) else [*names, "chunk_size"]

    def fault(self) -> str:
        """Say what would end a run in its first step, such as terms with other parameters; return "" for nothing."""
        if self.terms is None:
            return "" if self.kind is Kind.SIMREG else "it has no function that computes its terms (terms)"
        for name, known in self.options.items():
            if not (isinstance(known, str | int | float) or (isinstance(known, tuple) and known)):
                return f"its option {name} has {known!r} where words or a default belong"
        named = self.limits.keys() | self.idle_with.keys() | set().union(*self.idle_with.values())
        if unknown := sorted(named - self.options.keys()):
            return f"limits or idle_with name options that it does not have: {', '.join(unknown)}"
        defaults = {name: checked_option(name, known, None) for name, known in self.options.items()}
        scalars = self.scalars(defaults, self.temperature or 1.0)
        if scalars and self.kind in (Kind.SUMS, Kind.HEAD):
            return f"it trains {', '.join(scalars)}, which terms of its kind are not given"
        taken = inspect.signature(self.terms).parameters
        given = {"temperature", *scalars} if self.temperature is not None else {*scalars}
        missing = (given | self.options.keys()) - set(self.other_options) - taken.keys()
        if self.kind is not Kind.PAIRS or any(one.kind is one.VAR_KEYWORD for one in taken.values()) or not missing:
            return ""
        return f"its terms do not take {', '.join(sorted(missing))}"


def parse_options(value: object, prefix: str = "") -> dict[str, object]:
    """Read options given as a mapping, as pairs, or as text: "form=supcon_out"; the prefix may stand before each."""
    if isinstance(value, str):
        pairs: list[Any] = [word.partition("=")[::2] for word in value.split(",") if word]
    elif isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        pairs = list(value) if isinstance(value, list | tuple) else [value]
    for pair in pairs:
        if not (isinstance(pair, list | tuple) and len(pair) == 2):
            kinds = 'a mapping, pairs, or text such as "form=supcon_out,self_positive=never"'
            raise ValueError(f"SimReg objective options must be {kinds}, not {pair!r}")
    named: dict[str, object] = {}
    for word, setting in pairs:  # "self-positive" is self_positive; the objective before a dot keeps its hyphens
        objective, dot, name = str(word).strip().rpartition(".")
        name = (objective + dot + name.replace("-", "_")).removeprefix(prefix)
        if name in named:
            raise ValueError(f"SimReg objective option {name} is given more than once: leave one of them")
        named[name] = setting
    return named


def checked_options(objective: Objective, value: object) -> Pairs:
    """Return all options of the objective, with defaults for those not given; its own name may stand before each."""
    known, given = objective.options, parse_options(value, f"{objective.name}.")
    for name, setting in given.items():
        if name not in known:
            raise ValueError(
                f"SimReg objective {objective.name} does not support {name}={setting}: its options are "
                f"{', '.join(known) or 'none'}"
            )
    values = {name: checked_option(name, known[name], given.get(name)) for name in known}
    chosen, faults = {f"{name}={setting}" for name, setting in values.items()}, []
    for name, (least, most) in objective.limits.items():
        if not least <= float(values[name]) <= most:
            may_be = f"at least {least:g}" if math.isinf(most) else f"from {least:g} to {most:g}"
            faults.append(f"SimReg objective option {name} must be {may_be}, not {values[name]:g}")
    for name, others in objective.idle_with.items():
        is_idle = all(values[other] == setting for other, setting in others.items())
        if is_idle and values[name] != checked_option(name, known[name], None):
            words = " and ".join(f"{other}={setting}" for other, setting in others.items())
            faults.append(f"SimReg objective option {name} has no effect with {words}: drop it")
    faults += [why for choices, why in objective.excludes.items() if chosen.issuperset(choices)]
    if faults:
        raise ValueError(faults[0])
    return tuple(values.items())


def checked_option(name: str, known: OptionKind, value: object) -> str | float:
    """Check one option and return it, or its default for None."""
    checked: str | float
    if isinstance(known, tuple):
        checked = str(known[0] if value is None else value)
        fits, kind = value is None or value in known, f"one of {', '.join(known)}"
    elif isinstance(known, str):
        checked, kind = str(known if value is None else value), f"{known}, or whole numbers from 1 such as 64/128"
        fits = checked == known or all(map(is_count, checked.split("/")))
    elif isinstance(known, int):
        digits, kind = str(known if value is None else value).removesuffix(".0"), "a whole number of 0 or more"
        fits = digits.isdecimal() and len(digits) < 20
        checked = int(digits) if fits else math.nan
    else:
        checked, kind = 0.0 + number_of(known if value is None else value), "a number"  # of -0.0 it makes 0.0
        fits = math.isfinite(checked)
    if not fits:
        raise ValueError(f"SimReg objective option {name} must be {kind}, not {value!r}")
    return checked


def number_of(text: object) -> float:
    """Return the number that a text, or a number, is; NaN if it is none."""
    try:
        return math.nan if isinstance(text, bool) else float(text)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


def is_count(text: str) -> bool:
    """Return whether the text is a whole number above 0, with no more digits than a layer or feature can have."""
    return text.isdecimal() and len(text) < 10 and int(text) > 0
