# SPDX-License-Identifier: Apache-2.0
"""Releases of megatron-core next to one another: each in a folder of its own, torch shared with this interpreter."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

REFERENCE = "0.19.2"
VERSIONS = ("0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", REFERENCE)
"""The last release of each line; the tag of the last line is named after its first release."""

_TAGS = {REFERENCE: "core_v0.19.0", "main": "main"}
EXTRAS = ("six", "einops")
"""What source trees up to 0.16 import beyond the packages of this interpreter."""

_HELPER = "helpers_cpp*.so"
_TIMEOUT = 1800  # seconds; 0.12 is built from source


class ReleaseError(RuntimeError):
    """A release cannot be had here; the message says why."""


def tag_of(version: str) -> str:
    return _TAGS.get(version, f"core_v{version}")


def installed(version: str, cache: Path, python: str = sys.executable) -> Path:
    """The folder of megatron-core `version` below `cache`, filled by this Python's pip; else ReleaseError."""
    folder = cache / ("core" if python == sys.executable else f"core-{python_version(python)}") / version
    if not (folder / "megatron" / "core").is_dir():
        _pip_install(f"megatron-core=={version}", folder=folder, python=python)
    return folder


def extras(cache: Path) -> Path:
    """A folder with EXTRAS, likewise."""
    folder = cache / "-".join(("extras", *EXTRAS))
    if not folder.is_dir():
        _pip_install(*EXTRAS, folder=folder)
    return folder


def _pip_install(*packages: str, folder: Path, python: str = sys.executable) -> None:
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    command = [python, "-m", "pip", "install", "-q", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--target", str(partial), *packages],
        text=True,
        timeout=_TIMEOUT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise ReleaseError(f"pip could not install it: {(done.stdout.strip().splitlines() or ['?'])[-1]}")
    partial.rename(folder)


@cache
def python_version(python: str) -> str:
    """ "3.10.13", asked of the interpreter itself; ReleaseError if it does not answer."""
    return _answer(python, "import platform; print(platform.python_version())")


@cache
def torch_version(python: str) -> str:
    """The torch that this interpreter has, likewise."""
    return _answer(python, "import torch; print(torch.__version__)")


def _answer(python: str, question: str) -> str:
    try:
        done = subprocess.run([python, "-c", question], capture_output=True, text=True, timeout=120)
    except OSError as error:
        raise ReleaseError(f"{python} cannot be started: {error.strerror}") from error
    if done.returncode:
        raise ReleaseError(f"{python} does not answer: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return done.stdout.strip()


def line_of(version: str) -> str:
    """The release line of a version: 0.13.1 -> 0.13; main is its own."""
    return version if version == "main" else ".".join(version.split(".")[:2])


def given_tree(version: str, sources: Path | None) -> Path | None:
    """The source tree of this release in `sources` or MEGATRON_PATH; ReleaseError if it is another line's."""
    named = os.environ.get("MEGATRON_PATH")
    if named and _is_tree(Path(named)) and tree_line(Path(named)) == line_of(version):
        return Path(named)
    for tree in [sources / tag_of(version), sources / version] if sources else []:
        if _is_tree(tree):
            if tree_line(tree) != line_of(version):
                raise ReleaseError(f"{tree.name} holds a tree of {tree_line(tree)}")
            return tree
    return None


def _is_tree(place: Path) -> bool:
    return (place / "pretrain_gpt.py").is_file()


def tree_line(tree: Path) -> str:
    """The release line that the tree itself names; main is any tree newer than the last release."""
    text = (tree / "megatron" / "core" / "package_info.py").read_text(encoding="utf-8")
    parts = dict(re.findall(r"^(MAJOR|MINOR) = (\d+)", text, flags=re.MULTILINE))
    line = (int(parts["MAJOR"]), int(parts["MINOR"]))
    newest = tuple(map(int, REFERENCE.split(".")[:2]))
    return "main" if line > newest else ".".join(map(str, line))


def working_tree(version: str, sources: Path | None, cache: Path) -> Path | None:
    """A copy of the source tree given for this release, if one is, with the compiled helper that it needs."""
    given = given_tree(version, sources)
    if given is None:
        return None
    copy = cache / "trees" / version
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(given / "megatron", copy / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    for script in given.glob("*.py"):
        shutil.copy(script, copy)
    _add_helper(copy, installed(REFERENCE if version == "main" else version, cache))
    return copy


def _add_helper(tree: Path, core: Path) -> None:
    """The index builder of the data sets is C++: a tree has its source, the package has it compiled."""
    place = tree / "megatron" / "core" / "datasets"
    if not list(place.glob(_HELPER)):
        for helper in (core / "megatron" / "core" / "datasets").glob(_HELPER):
            shutil.copy(helper, place)
