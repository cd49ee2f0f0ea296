# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.flags_page > docs/flags.md`: every flag with its sentence, from the parser itself."""

from __future__ import annotations

import argparse

from simreg_megatron.config.flags import add_simreg_arguments

_VALUES = {None: "", int: " N", float: " NUMBER", str: " VALUE"}
_MORE = """Of single objectives, and lambda's schedule: [objectives.md](objectives.md). Scope and layouts:
[exact.md](exact.md). The launch scripts' own options: `bash launch/pretrain_llama.sh --help`. With those of Megatron:
`python -m simreg_megatron pretrain_gpt.py --help`."""


_OPENING = """This page lists every flag of SimReg and AdaGC. Megatron's own flags are not here. Made by
`python -m tools.flags_page` from the parser; a test compares the two."""


def flags_page() -> str:
    """Return docs/flags.md."""
    lines = ["# Flags", "", _OPENING]
    for title, found in described_flags().items():
        lines += ["", f"## {title[:1].upper()}{title[1:]}", "", "| flag | |", "|---|---|"]
        lines += [f"| `{name}` | {sentence.replace('|', chr(92) + '|')} |" for name, sentence in found]
    return "\n".join([*lines, "", _MORE, ""])


def described_flags() -> dict[str, list[tuple[str, str]]]:
    """Return by group each flag with what it takes, and its sentence, as Megatron's parser gets them."""
    parser = add_simreg_arguments(argparse.ArgumentParser(add_help=False))
    found: dict[str, list[tuple[str, str]]] = {}
    for group in parser._action_groups:
        for action in group._group_actions:
            value = "[=force]" if action.nargs == "?" else _VALUES[action.type]  # type: ignore[index]
            text = action.help or ""
            sentence = f"{text[:1].upper()}{text[1:]}."
            found.setdefault(str(group.description), []).append((action.option_strings[0] + value, sentence))
    return found


if __name__ == "__main__":
    print(flags_page(), end="")
