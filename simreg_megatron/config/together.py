# SPDX-License-Identifier: Apache-2.0
"""Several objectives in one run, "simreg:auto,sigreg:0.05": each with its weight, and the settings that it knows."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from simreg_megatron import objectives
from simreg_megatron.config.values import as_typed, checked_lambda
from simreg_megatron.objectives.options import checked_option, checked_options, words

SimRegConfig = Any  # its module imports this one


def checked_together(config: SimRegConfig) -> tuple[tuple[str, str | float], ...]:
    """The options of all parts; what they were given and no part knows is refused."""
    if config.lambda_ != 0:
        raise ValueError(
            f"SimReg lambda {config.lambda_} has no effect when each objective has its own weight: "
            f"write it after the name, as in simreg:{config.lambda_}"
        )
    defaults = _defaults(config)
    for name in defaults.keys() - {"objective", "objective_options", "temperature"}:
        if getattr(config, name) != defaults[name] and all(name in part.idle_settings for part in config.parts):
            raise ValueError(
                f"SimReg {name.replace('_', ' ')} {as_typed(getattr(config, name))} has no effect on any of "
                f"{config.objective}: drop it"
            )
    of_head = [part.objective for part in config.parts if part.through_head]
    if config.looks_inside and of_head:
        raise ValueError(
            f"SimReg objective {of_head[0]} is of the final states only, which enter the output layer: drop "
            "--simreg-layers and --simreg-placement"
        )
    own = [(f"{part.objective}.{name}", value) for part in config.parts for name, value in part.objective_options]
    temperatures = [(name, value) for name, value in words(config.objective_options) if name.endswith(".temperature")]
    return (*own, *((name, float(str(value))) for name, value in temperatures))


def parts_of(config: SimRegConfig) -> tuple[SimRegConfig, ...]:
    """The settings of each objective: its weight as its lambda, and of what was given that which it knows."""
    weights = _weights(config.objective)
    options: dict[str, dict[str, object]] = {name: {} for name in weights}
    for word, value in words(config.objective_options):
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
        record = objectives.find(objective)
        given: dict[str, Any] = {"objective": objective, "lambda_": weight}
        given["objective_options"] = checked_options(record, own)
        idle = record.idle_settings(dict(given["objective_options"]))
        rest = _defaults(config).keys() - given.keys() - {"temperature", *idle}
        shared: dict[str, Any] = {name: getattr(config, name) for name in rest}
        if temperature is not None:
            shared["temperature"] = checked_option(f"{objective}.temperature", 1.0, temperature)
        found.append(type(config)(**given, **shared))
    return tuple(found)


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


def _shared_temperature(config: SimRegConfig, objective: str, names: list[str]) -> float | None:
    """The one temperature goes to SimReg, or to the only part that has one."""
    if config.temperature is None:
        return None
    takers = ["simreg"] if "simreg" in names else [name for name in names if objectives.find(name).temperature]
    if len(takers) != 1:
        raise ValueError(
            f"SimReg temperature {config.temperature} belongs to none or to several of {config.objective}: give it "
            f"as an option of one, such as {(takers or names)[0]}.temperature={config.temperature}"
        )
    return config.temperature if objective == takers[0] else None


def _defaults(config: SimRegConfig) -> dict[str, Any]:
    return {field.name: field.default for field in fields(config)}
