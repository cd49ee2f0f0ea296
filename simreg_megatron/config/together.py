# SPDX-License-Identifier: Apache-2.0
"""Several objectives in one run, "simreg:auto,sigreg:0.05": each with its weight, and the settings that it knows.

Settings are those of a `SimRegConfig`, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simreg_megatron import objectives
from simreg_megatron.config.values import as_typed, checked_lambda
from simreg_megatron.objectives.record import Kind, Pairs, checked_option, checked_options, words

Settings = Mapping[str, Any]
_OWN = ("objective", "objective_options", "temperature", "lambda_")  # of each objective, not shared


def checked_together(settings: Settings, defaults: Settings) -> Pairs:
    """Return the options of all parts; an option that no part knows is refused."""
    if settings["lambda_"] != 0:
        raise ValueError(
            f"SimReg lambda {settings['lambda_']} has no effect when each objective has its own weight: "
            f"write it after the name, as in simreg:{settings['lambda_']}"
        )
    own: list[tuple[str, str | float]] = []
    idle, of_head = set(defaults.keys() - set(_OWN)), ""
    for part in settings_of_parts(settings, defaults):
        record, options = objectives.find(part["objective"]), dict(part["objective_options"])
        own += [(f"{record.name}.{name}", value) for name, value in part["objective_options"]]
        idle &= set(record.idle_settings(options))
        of_head = of_head or (record.name if record.kind_with(options) is Kind.HEAD else "")
    for name in sorted(idle):
        if settings[name] != defaults[name]:
            raise ValueError(
                f"SimReg {name.replace('_', ' ')} {as_typed(settings[name])} has no effect on any of "
                f"{settings['objective']}: drop it"
            )
    if of_head and (settings["placement"], settings["layers"]) != (defaults["placement"], defaults["layers"]):
        raise ValueError(
            f"SimReg objective {of_head} is of the final states only, which enter the output layer: drop "
            "--simreg-layers and --simreg-placement"
        )
    given = words(settings["objective_options"])
    return (*own, *((name, float(str(value))) for name, value in given if name.endswith(".temperature")))


def settings_of_parts(settings: Settings, defaults: Settings) -> list[dict[str, Any]]:
    """Return the settings of each objective: its weight as its lambda, and those of the given options that it knows."""
    weights = _weights(settings["objective"])
    options: dict[str, dict[str, object]] = {name: {} for name in weights}
    for word, value in words(settings["objective_options"]):
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
        shared = _shared_temperature(settings, objective, list(weights))
        temperature = own.pop("temperature", shared)
        if shared not in (None, temperature):
            raise ValueError(
                f"SimReg temperature {shared} has no effect next to {objective}.temperature={temperature}: drop one"
            )
        record = objectives.find(objective)
        checked = checked_options(record, own)
        known = defaults.keys() - {*_OWN, *record.idle_settings(dict(checked))}
        part = {name: settings[name] for name in known}
        part |= {"objective": objective, "lambda_": weight, "objective_options": checked}
        if temperature is not None:
            part["temperature"] = checked_option(f"{objective}.temperature", 1.0, temperature)
        found.append(part)
    return found


def _weights(text: str) -> dict[str, float | str]:
    """ "simreg:auto,sigreg:0.05" by name."""
    known = [name for name in objectives.names() if name != "none"]
    found: dict[str, float | str] = {}
    for word in text.split(","):
        name, colon, weight = (piece.strip() for piece in word.partition(":"))
        if not colon or name not in known or name in found:
            raise ValueError(
                f"SimReg objective {text!r} must be one name, or several different ones with a weight each, such as "
                f"simreg:auto,sigreg:0.05; choose from {', '.join(known)}"
            )
        found[name] = checked_lambda(weight)
        if found[name] == 0:
            raise ValueError(f"SimReg objective {name} has weight 0 in {text!r}: give it another, or leave it out")
    return found


def _shared_temperature(settings: Settings, objective: str, names: list[str]) -> float | None:
    """Decide which part the temperature belongs to: SimReg, or the only part that has one."""
    temperature: float | None = settings["temperature"]
    if temperature is None:
        return None
    takers = ["simreg"] if "simreg" in names else [name for name in names if objectives.find(name).temperature]
    if len(takers) != 1:
        instead = f"give it as an option of one, such as {takers[0]}.temperature={temperature}" if takers else "drop it"
        whose = f"{'several' if takers else 'none'} of {settings['objective']}"
        raise ValueError(f"SimReg temperature {temperature} belongs to {whose}: {instead}")
    return temperature if objective == takers[0] else None
