# SPDX-License-Identifier: Apache-2.0
"""Command lines as lists of flags, each with its values, and the preset files that hold them."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable
from pathlib import Path

Flag = tuple[str, ...]
"""One flag and its values: ("--lr", "4e-4"), ("--swiglu",) or ("--lr=4e-4",)."""


class LaunchError(ValueError):
    """A run that cannot start as asked; the message is the one sentence the user reads."""


def group_flags(words: Iterable[str]) -> list[Flag]:
    """Cut a command line before each flag; a word before the first one is a LaunchError."""
    groups: list[Flag] = []
    for word in words:
        if word.startswith("--") or (len(word) == 2 and word[0] == "-" and word[1].isalpha()):  # not -1
            groups.append((word,))
        elif groups:
            groups[-1] += (word,)
        else:
            raise LaunchError(f"{word!r} belongs to no flag: Megatron takes --flag VALUE only")
    return groups


def flag_name(flag: Flag) -> str:
    return flag[0].partition("=")[0]


def flag_names(flags: Iterable[Flag]) -> set[str]:
    return {flag_name(flag) for flag in flags}


def flag_value(flags: Iterable[Flag], name: str) -> str | None:
    """Return the first value of a flag's last occurrence, as argparse reads it; None if absent or bare."""
    value = None
    for flag in flags:
        if flag_name(flag) == name:
            value = flag[0].partition("=")[2] or (flag[1] if len(flag) > 1 else None)
    return value


def flag_number(flags: Iterable[Flag], name: str, default: int) -> int:
    """Return the value of a flag that counts something; a LaunchError unless it is a positive whole number."""
    value = flag_value(flags, name)
    if value is None:
        return default
    if not value.isdecimal() or int(value) < 1:
        raise LaunchError(f"{name} takes a positive whole number, not {value!r}")
    return int(value)


def without(flags: Iterable[Flag], names: Collection[str]) -> list[Flag]:
    return [flag for flag in flags if flag_name(flag) not in names]


def flatten(flags: Iterable[Flag]) -> list[str]:
    return [word for flag in flags for word in flag]


def read_preset(path: Path) -> list[Flag]:
    """Read the flags of a preset file: one per line, `#` opens a comment."""
    return group_flags(shlex.split(path.read_text(encoding="utf-8"), comments=True))
