# SPDX-License-Identifier: Apache-2.0
"""Flags of ours that are misspelled: which one was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_FAMILIES = ("--simreg-", "--adagc")
MEANT = {
    "weight": "--simreg-lambda", "tau": "--simreg-temperature", "chunk": "--simreg-chunk-size",
    "loss": "--simreg-objective",
}  # fmt: skip
"""Names that others use for our flags, without their dashes."""


def refuse_unknown(words: Iterable[str], known: Iterable[str]) -> None:
    """Also where a script lets Megatron pass over what it does not know.

    Args:
        words: that no flag took.
        known: all flags.

    Raises:
        ValueError: one of the words is spelled like a flag of ours.
    """
    for word in words:
        name = word.partition("=")[0]
        if name.startswith(_FAMILIES):
            family = next(family for family in _FAMILIES if name.startswith(family))
            tails = {_tail(option): option for option in known if option.startswith(family)}
            near = difflib.get_close_matches(_tail(name), tails, n=1)
            meant = MEANT.get(_tail(name)) or (tails[near[0]] if near else "")
            hint = f"did you mean {meant}?" if meant else "`simreg-megatron flags` lists them"
            raise ValueError(f"there is no flag {name}: {hint}")


def _tail(name: str) -> str:
    """Return the part of a flag after its common prefix."""
    return name.removeprefix("--simreg-").removeprefix("--adagc-")
