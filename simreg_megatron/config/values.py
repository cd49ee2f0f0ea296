# SPDX-License-Identifier: Apache-2.0
"""Settings that are written as text: read, checked, and back to how one would type them.

The text of an objective may name several, "simreg:auto,sigreg:0.05": each with its weight, and the settings that it
knows. Settings are those of a `SimRegConfig`, by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

from simreg_megatron import objectives
from simreg_megatron.notices import refuse
from simreg_megatron.objectives.record import Pairs, checked_option, checked_options, is_count, number_of, parse_options

TEMPERATURES = (1e-4, 1e4)
"""In float32 the errors of a similarity, divided by less, would be as large as the term (docs/reliability.md)."""
_TYPES: dict[str, tuple[type, Callable[[Any], Any], str]] = {
    "int": (Integral, int, "a whole number"),
    "float": (Real, float, "a number"),
    "bool": (bool, bool, "True or False"),
    "str": (str, str, "a word"),
}
Settings = Mapping[str, Any]
_PER_OBJECTIVE = ("objective", "objective_options", "temperature", "lambda_")  # of each objective, not shared


def as_typed(value: object) -> str:
    """Write a setting as one would type it: options as name=value, lists with commas."""
    if not isinstance(value, tuple):
        return str(value)
    return ",".join("=".join(map(str, part)) if isinstance(part, tuple) else str(part) for part in value) or "none"


def describe(name: str, value: object) -> str:
    """Name a setting and its value as messages do."""
    return f"SimReg {name.replace('_', ' ')} {as_typed(value)}"


def refuse_other_types(owner: str, settings: Any) -> None:
    """Raise if a field of the record has another type than its annotation: 2.5 steps, or the text of a YAML file.

    Numbers of numpy become Python's. Fields of several kinds have checks of their own.
    """
    for field in fields(settings):
        kind, _, none = str(field.type).partition(" | ")
        value = getattr(settings, field.name)
        if kind not in _TYPES or none not in ("", "None") or (value is None and none):
            continue
        expected, convert, words = _TYPES[kind]
        if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
            raise ValueError(f"{owner} {field.name.replace('_', ' ')} must be {words}, not {value!r}")
        if type(value) not in (int, float):
            object.__setattr__(settings, field.name, convert(value))


def checked_lambda(value: float | str) -> float | str:
    number = number_of(value)
    if value == "auto" or 0 <= number < math.inf:
        return "auto" if value == "auto" else number
    raise ValueError(
        f"SimReg lambda must be a finite number of 0 or more, or auto, not {value if str(value) else 'empty'}"
    )


def checked_layers(value: object) -> tuple[int | str, ...]:
    """("final",), (3, "final"), or the same as text: "3,final". Numbers first, each once, ascending."""
    entries = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else (value,)
    texts: list[Any] = [str(word).strip() for word in entries]
    wrong = [text for text in texts if text != "final" and not is_count(text)] if texts else [value]
    if wrong:
        raise ValueError(f"SimReg layers must be final, or layer numbers from 1 such as 12,24,final; not {wrong[0]!r}")
    return (*sorted({int(text) for text in texts if text != "final"}), *(("final",) if "final" in texts else ()))


def checked_together(settings: Settings, defaults: Settings, parts: Sequence[Any]) -> Pairs:
    """Return the options of all parts; a setting that no part knows is refused."""
    options = [(f"{part.objective}.{name}", value) for part in parts for name, value in part.objective_options]
    idle = set(defaults.keys() - set(_PER_OBJECTIVE)).intersection(*(part.idle_settings for part in parts))
    of_head = next((part.objective for part in parts if part.through_head), "")
    refuse(
        (settings["lambda_"] != 0,
         f"SimReg lambda {settings['lambda_']} has no effect when each objective has its own weight: "
         f"write it after the name, as in simreg:{settings['lambda_']}"),
        *((settings[name] != defaults[name],
           f"{describe(name, settings[name])} has no effect on any of {settings['objective']}: drop it")
          for name in sorted(idle)),
        (of_head and any(settings[name] != defaults[name] for name in ("placement", "layers")),
         f"SimReg objective {of_head} is of the final states only, which enter the output layer: drop "
         "--simreg-layers and --simreg-placement"),
    )  # fmt: skip
    given = parse_options(settings["objective_options"]).items()
    return (*options, *((name, float(str(value))) for name, value in given if name.endswith(".temperature")))


def settings_of_parts(settings: Settings, defaults: Settings) -> list[dict[str, Any]]:
    """Return the settings of each objective: its weight as its lambda, and those of the given options that it knows."""
    weights = _weights(settings["objective"])
    options: dict[str, dict[str, object]] = {name: {} for name in weights}
    for word, value in parse_options(settings["objective_options"]).items():
        objective, dot, name = word.rpartition(".")
        if not dot or objective not in weights:
            raise ValueError(
                f"with several SimReg objectives an option begins with the name of its own, as in "
                f"{next(iter(weights))}.{name or word}, and {word!r} does not"
            )
        options[objective][name] = value
    if (shared := settings["temperature"]) is not None:
        owner = _owner_of_temperature(settings, list(weights))
        if (other := options[owner].setdefault("temperature", shared)) != shared:
            raise ValueError(f"SimReg temperature {shared} has no effect next to {owner}.temperature={other}: drop one")
    parts = []
    for objective, weight in weights.items():
        temperature, record = options[objective].pop("temperature", None), objectives.find(objective)
        if temperature is not None:
            temperature = checked_option(f"{objective}.temperature", 1.0, temperature)
        checked = checked_options(record, options[objective])
        known = defaults.keys() - {*_PER_OBJECTIVE, *record.idle_settings(dict(checked))}
        part = {"objective": objective, "lambda_": weight, "objective_options": checked, "temperature": temperature}
        parts.append({name: settings[name] for name in known} | part)
    return parts


def _weights(text: str) -> dict[str, float | str]:
    """ "simreg:auto,sigreg:0.05" by name."""
    known = [name for name in objectives.names() if name != "none"]
    weights: dict[str, float | str] = {}
    for word in text.split(","):
        name, colon, weight = (piece.strip() for piece in word.partition(":"))
        refuse(
            (not colon or name not in known or name in weights,
             f"SimReg objective {text!r} must be one name, or several different ones with a weight each, such as "
             f"simreg:auto,sigreg:0.05; choose from {', '.join(known)}"),
            (colon and number_of(weight) == 0,
             f"SimReg objective {name} has weight 0 in {text!r}: give it another, or leave it out"),
        )  # fmt: skip
        weights[name] = checked_lambda(weight)
    return weights


def _owner_of_temperature(settings: Settings, names: list[str]) -> str:
    """Return the part that the given temperature belongs to: SimReg, or the only part that has one."""
    temperature = settings["temperature"]
    owners = ["simreg"] if "simreg" in names else [name for name in names if objectives.find(name).temperature]
    if len(owners) != 1:
        remedy = f"give it as an option of one, such as {owners[0]}.temperature={temperature}" if owners else "drop it"
        number = "several" if owners else "none"
        raise ValueError(f"SimReg temperature {temperature} belongs to {number} of {settings['objective']}: {remedy}")
    return owners[0]
