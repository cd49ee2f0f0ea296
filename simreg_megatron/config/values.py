# SPDX-License-Identifier: Apache-2.0
"""Single settings: what is written as several words, checked, and back to how one would type it."""

from __future__ import annotations

import math


def as_typed(value: object) -> str:
    """A setting as one would give it: options as name=value, several of anything with commas."""
    if not isinstance(value, tuple):
        return str(value)
    return ",".join("=".join(map(str, part)) if isinstance(part, tuple) else str(part) for part in value) or "none"


def checked_lambda(value: float | str) -> float | str:
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


def checked_layers(value: object) -> tuple[int | str, ...]:
    """("final",), (3, "final"), or the same as text: "3,final". Numbers first, each once, ascending."""
    words = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else (value,)
    numbers, final = set(), False
    for word in words:
        text = str(word).strip()
        if text == "final":
            final = True
        elif text.isdecimal() and len(text) < 10 and int(text) > 0:
            numbers.add(int(text))
        else:
            raise ValueError(f"SimReg layers must be final, or layer numbers from 1 such as 12,24,final; not {text!r}")
    return (*sorted(numbers), *(("final",) if final else ()))
