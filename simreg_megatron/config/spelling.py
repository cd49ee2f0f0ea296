# SPDX-License-Identifier: Apache-2.0
"""Flags of ours that argparse does not take: which one was meant, and what is wrong in one sentence."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_FAMILIES = ("--simreg-", "--adagc")
_OF_OURS = re.compile(r"argument ((?:--simreg-|--adagc)[\w-]*): (.*)", re.DOTALL)
_WORDS_OF_ARGPARSE = (
    ("invalid int value:", "takes a whole number, not"),
    ("invalid float value:", "takes a number, not"),
    ("expected one argument", "needs a value: write it after the flag"),
    ("ignored explicit argument", "is a switch: give it without the value"),
)
"""How its sentences begin, and ours in their place."""


MEANT = {
    "weight": "--simreg-lambda", "tau": "--simreg-temperature", "chunk": "--simreg-chunk-size",
    "loss": "--simreg-objective",
}  # fmt: skip
"""Names that others use for our flags, without their dashes."""


def in_our_words(message: str) -> str | None:
    """Of what argparse says about a flag of ours; None where it is about another."""
    found = _OF_OURS.match(message)
    if found is None:
        return None
    name, what = found.groups()
    for argparses, words in _WORDS_OF_ARGPARSE:
        what = what.replace(argparses, words, 1)
    return f"{name} {what}"


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
    """What tells our flags apart."""
    return name.removeprefix("--simreg-").removeprefix("--adagc-")
