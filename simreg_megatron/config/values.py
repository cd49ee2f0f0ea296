# SPDX-License-Identifier: Apache-2.0
"""Single settings: what is written as several words, checked, and back to how one would type it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

from simreg_megatron.objectives.record import counts_from_one

TEMPERATURES = (1e-4, 1e4)
"""In float32 the errors of a similarity, divided by less, would be as large as the term (docs/reliability.md)."""
_KINDS: dict[str, tuple[type, Callable[[Any], Any], str]] = {
    "int": (Integral, int, "a whole number"),
    "float": (Real, float, "a number"),
    "bool": (bool, bool, "True or False"),
    "str": (str, str, "a word"),
}


def as_typed(value: object) -> str:
    """Write a setting as one would type it: options as name=value, lists with commas."""
    if not isinstance(value, tuple):
        return str(value)
    return ",".join("=".join(map(str, part)) if isinstance(part, tuple) else str(part) for part in value) or "none"


def refuse_other_kinds(of: str, settings: Any) -> None:
    """Raise if a field of the record has another type than its annotation: 2.5 steps, or the text of a YAML file.

    Numbers of numpy become Python's. Fields of several kinds have checks of their own.
    """
    for field in fields(settings):
        kind, _, none = str(field.type).partition(" | ")
        value = getattr(settings, field.name)
        if kind not in _KINDS or none not in ("", "None") or (value is None and none):
            continue
        wanted, plain, words = _KINDS[kind]
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            raise ValueError(f"{of} {field.name.replace('_', ' ')} must be {words}, not {value!r}")
        if type(value) not in (int, float):
            object.__setattr__(settings, field.name, plain(value))


def checked_lambda(value: float | str) -> float | str:
    if value == "auto":
        return "auto"
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise ValueError(
            f"SimReg lambda must be a finite number of 0 or more, or auto, not {value if str(value) else 'empty'}"
        )
    return number


def checked_layers(value: object) -> tuple[int | str, ...]:
    """("final",), (3, "final"), or the same as text: "3,final". Numbers first, each once, ascending."""
    words = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else (value,)
    numbers, final = set(), False
    for word in words:
        text = str(word).strip()
        if text == "final":
            final = True
        elif counts_from_one(text):
            numbers.add(int(text))
        else:
            raise ValueError(f"SimReg layers must be final, or layer numbers from 1 such as 12,24,final; not {text!r}")
    if not (numbers or final):
        raise ValueError(
            "SimReg layers must name at least one state: final, or layer numbers from 1 such as 12,24,final"
        )
    return (*sorted(numbers), *(("final",) if final else ()))
