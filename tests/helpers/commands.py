# SPDX-License-Identifier: Apache-2.0
"""Commands as the pages print them, compared with what exists: targets, modules, scripts and flags."""

import importlib.util
import re
import shlex
from collections.abc import Collection, Iterator
from functools import cache

from tests.helpers.pages import ROOT

Words = list[str]

_OPERATORS = {"&&", "||", "|", ";"}
_NOT_OURS = {"apt-get", "cp", "git", "hf", "mkdir", "pip", "pre-commit", "scancel", "source", "tar", "touch"}
_SOURCES = ("simreg_megatron", "launch", "research", "benchmarks", "tools", "examples")


def commands(text: str) -> Iterator[Words]:
    """Yield the commands of a block of shell, without comments; \\ joins lines, && and the like cut them."""
    for line in text.replace("\\\n", " ").splitlines():
        words: Words = []
        for word in [*shlex.split(line, comments=True), ";"]:
            if word not in _OPERATORS:
                words.append(word)
            elif words:
                yield words
                words = []


def complaints(words: Words, megatron: Collection[str]) -> Iterator[str]:
    """Yield what a command names in vain: a target, module or script, or a flag that no parser has."""
    words = [word for word in words if not re.fullmatch(r"[A-Z_]+=[^-]*", word)]  # NAME=value
    head, rest = words[0].removeprefix(".venv/bin/"), words[1:]
    if head in _NOT_OURS:
        return
    if head == "make":
        (targets,) = re.findall(r"^TARGETS := (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        yield from (f"make has no target {word}" for word in rest if "=" not in word and word not in targets.split())
    for before, word in zip(words, rest, strict=False):
        if before == "-m" and not _is_module(word):
            yield f"there is no module {word}"
        if re.match(r"(launch|tools|benchmarks)/\S+\.(sh|py)$", word) and not (ROOT / word).is_file():
            yield f"there is no file {word}"
    for flag in re.findall(r"(?<!\S)--\w[\w-]*", " ".join(rest).replace("=", " ")):
        if flag not in megatron and flag not in known_flags():
            yield f"no parser has {flag}"


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@cache
def known_flags() -> frozenset[str]:
    """Return the flags that our Python or shell names, without the tests, which give wrong ones on purpose."""
    found = (path for folder in _SOURCES for path in (ROOT / folder).rglob("*.*"))
    paths = [path for path in found if path.suffix in (".py", ".sh", ".bash")]
    paths += [ROOT / "tests" / "conftest.py", *(ROOT / "tests").rglob("__main__.py")]
    return frozenset(flag for path in paths for flag in re.findall(r"--\w[\w-]*", path.read_text(encoding="utf-8")))
