# SPDX-License-Identifier: Apache-2.0
"""Options of an objective's own, from pairs or text to checked values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from simreg_megatron.objectives.record import Objective, OptionKind

Pairs = tuple[tuple[str, str | float], ...]


def words(value: object) -> list[tuple[str, object]]:
    """Options given as a mapping, as pairs, or as text: "form=supcon_out,self_positive=never".

    Raises:
        ValueError: they are none of these.
    """
    if isinstance(value, str):
        found: list[Any] = [word.partition("=")[::2] for word in value.split(",") if word]
    elif isinstance(value, Mapping):
        found = list(value.items())
    else:
        found = list(value) if isinstance(value, list | tuple) else [value]
    wrong = [pair for pair in found if not (isinstance(pair, list | tuple) and len(pair) == 2)]
    if wrong:
        raise ValueError(
            'SimReg objective options must be a mapping, pairs, or text such as "form=supcon_out,self_positive=never", '
            f"not {wrong[0]!r}"
        )
    named = [(_name(str(name)), setting) for name, setting in found]
    for name, count in Counter(name for name, _ in named).items():
        if count > 1:
            raise ValueError(f"SimReg objective option {name} is given {count} times: leave one of them")
    return named


def _name(word: str) -> str:
    """ "self-positive" is self_positive; the objective before a dot keeps its hyphens."""
    objective, dot, name = word.strip().rpartition(".")
    return objective + dot + name.replace("-", "_")


def checked_options(objective: Objective, value: object) -> Pairs:
    """Return all options of the objective, with defaults for those not given; its own name may stand before each."""
    own = f"{objective.name}."
    known, given = objective.options, {name.removeprefix(own): setting for name, setting in words(value)}
    for name, setting in given.items():
        why = objective.not_offered.get((name, str(setting)))
        if why:
            raise ValueError(f"SimReg objective {objective.name} does not support {name}={setting}: {why}")
        if name not in known:
            has = ", ".join(known) if known else "no options"
            raise ValueError(f"unknown option {name!r} of SimReg objective {objective.name}: it has {has}")
    found = tuple((name, checked_option(name, known[name], given.get(name))) for name in known)
    for name, (least, most) in objective.limits.items():
        if not least <= (number := float(dict(found)[name])) <= most:
            may_be = f"at least {least:g}" if math.isinf(most) else f"from {least:g} to {most:g}"
            raise ValueError(f"SimReg objective option {name} must be {may_be}, not {number:g}")
    for name, (other, setting) in objective.idle_with.items():
        values = dict(found)
        if values[other] == setting and values[name] != checked_option(name, known[name], None):
            raise ValueError(f"SimReg objective option {name} has no effect with {other}={setting}: drop it")
    return found


def checked_option(name: str, known: OptionKind, value: object) -> str | float:
    """Check one option and return it, or its default for None."""
    if isinstance(known, str):
        return _checked_prefixes(name, known, value)
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


def _checked_prefixes(name: str, default: str, value: object) -> str:
    numbers = str(value).split("/")
    if value not in (None, default) and not all(map(counts_from_one, numbers)):
        raise ValueError(
            f"SimReg objective option {name} must be {default}, or whole numbers from 1 such as 64/128, not {value!r}"
        )
    return default if value is None else str(value)


def counts_from_one(text: str) -> bool:
    """Return whether the text is a whole number above 0, with no more digits than a layer or feature can have."""
    return text.isdecimal() and len(text) < 10 and int(text) > 0
