# SPDX-License-Identifier: Apache-2.0
"""PREFIX of PREFIX.bin and PREFIX.idx: whether both are there, and which word was meant where they are not."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from simreg_megatron.data.assemble import MANIFEST
from simreg_megatron.data.settings import read_json, section

ENDINGS = (".bin", ".idx")


def is_pair(prefix: str | os.PathLike[str]) -> bool:
    return all(Path(f"{os.fspath(prefix)}{ending}").is_file() for ending in ENDINGS)


def explain_missing(prefix: str | os.PathLike[str]) -> str:
    """Why `prefix` names no pair, and what to give in its place: one sentence without its end."""
    path = Path(prefix)
    if path.suffix in ENDINGS and is_pair(path.with_suffix("")):
        return f"{path} is one file of a pair: give the prefix of both, {path.with_suffix('')}"
    if path.is_dir():
        return f"{path} is a folder, {_what_is_in(path)}"
    halves = [Path(f"{path}{ending}") for ending in ENDINGS]
    here = [half for half in halves if half.is_file()]
    if here:
        missing = halves[1 - halves.index(here[0])]
        return f"there is no {missing} beside {here[0].name}: copy both, or prepare the data again"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}: give the prefix of a .bin/.idx pair, without the ending"
    if path.name == "valid" and is_pair(path.with_name("train")) and _has_no_validation(path.parent):
        return (
            f"the set in {path.parent} has no validation text: leave --valid-data out, and 1 % of --data is used "
            "for validation if it is long enough, or prepare it again with --valid SOURCE or a larger --valid-share"
        )
    near = difflib.get_close_matches(path.name, _prefixes_in(path.parent), n=1)
    hint = (
        f"did you mean {path.with_name(near[0])}?" if near else f"{path.parent} is a folder, {_what_is_in(path.parent)}"
    )
    return f"there is no {halves[0]}: {hint}"


def _what_is_in(folder: Path) -> str:
    found = [folder / name for name in _prefixes_in(folder)]
    if not found:
        return "and has no prepared set: give the prefix of a .bin/.idx pair, without the ending"
    more = f" (there is also {', '.join(path.name for path in found[1:4])})" if found[1:] else ""
    return f"and a prefix is needed: {found[0]}{more}"


def _prefixes_in(folder: Path) -> list[str]:
    """The pairs of a folder, the training text before others."""
    names = sorted(path.stem for path in folder.glob("*.idx") if is_pair(path.with_suffix("")))
    return sorted(names, key=lambda name: name != "train")


def _has_no_validation(folder: Path) -> bool:
    manifest = read_json(folder / MANIFEST)
    return manifest is not None and not section(manifest, "tokens", folder / MANIFEST).get("valid")
