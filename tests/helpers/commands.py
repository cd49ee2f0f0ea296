# SPDX-License-Identifier: Apache-2.0
"""Commands as the pages print them, compared with what exists: make's targets, modules, scripts, and the flags of each.

`complaints(words, megatron)` is a sentence for each thing that a command names and that is not there. Placeholders such
as `...`, `PATH` and `<your flags>` are no flags, and values are not looked at.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import runpy
import shlex
import sys
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from pathlib import Path
from unittest import mock

from tests.helpers.pages import ROOT

Words = list[str]

_OPERATORS = {"&&", "||", "|", ";"}
_TORCHRUN = re.compile(r"--(nproc-per-node|nnodes|node-rank|master-addr|master-port|rdzv-\w+|standalone)$")
NOT_OURS = {"apt-get", "cp", "git", "hf", "mkdir", "pip", "pre-commit", "scancel", "source", "tar", "touch"}
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def commands(text: str) -> Iterator[Words]:
    """The commands of a block of shell: comments off, lines that end in a backslash joined, && and the like cut."""
    for line in text.replace("\\\n", " ").splitlines():
        words: Words = []
        for word in [*shlex.split(line, comments=True), ";"]:
            if word not in _OPERATORS:
                words.append(word)
            elif words:
                yield words
                words = []


def complaints(words: Sequence[str], megatron: Collection[str]) -> Iterator[str]:
    """Yield what a command names in vain; `megatron` are the flags of Megatron's own parser and of SimReg's."""
    words = list(words)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):  # NAME=value command
        del words[0]
    if not words or words[0].startswith("<"):  # <your command> --flags
        yield from _unknown(words, megatron, "Megatron")
        return
    head, rest = words[0].removeprefix(".venv/bin/"), words[1:]
    if head == "make":
        yield from _of_make(rest)
    elif head == "simreg-megatron":
        yield from _of_the_command(rest)
    elif head == "torchrun":
        yield from _of_torchrun(rest, megatron)
    elif head in ("bash", "sh"):
        yield from _of_script(rest, megatron)
    elif head == "python":
        yield from _of_python(rest, megatron)
    elif head not in NOT_OURS:
        yield f"nothing is known of {head!r}: enter it in NOT_OURS (tests/helpers/commands.py), or a check of its words"


def _flags(words: Sequence[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if re.match(r"--\w", word)]


def _unknown(words: Sequence[str], known: Collection[str], whose: str) -> Iterator[str]:
    for flag in _flags(words):
        if flag not in known:
            yield f"{whose} has no {flag}"


def _of_make(words: Sequence[str]) -> Iterator[str]:
    (targets,) = re.findall(r"^TARGETS := (.*)$", MAKEFILE, flags=re.MULTILINE)
    for word in words:
        name, is_variable, value = word.partition("=")
        if not is_variable:
            if word not in targets.split():
                yield f"make has no target {word}"
        elif f"$({name})" not in MAKEFILE:
            yield f"the Makefile knows no {name}"
        else:
            for module in re.findall(rf"\$\(PY\) -m ([\w.]+)[^\n]*\$\({name}\)", MAKEFILE):
                if module != "pytest":
                    yield from _unknown(shlex.split(value), options_of_module(module), f"python -m {module}")
            for script in re.findall(rf"\$\(PY\) ([\w/]+\.py) .*\$\({name}\)", MAKEFILE):
                yield from _unknown(shlex.split(value), options_of_module(script), script)


def _of_the_command(words: Sequence[str]) -> Iterator[str]:
    """`simreg-megatron WORDS`, by its own parsers."""
    from simreg_megatron import cli

    parser, path, words = cli.make_parser(), "simreg-megatron", list(words)
    while words and not words[0].startswith("-") and (known := _subparsers(parser)):
        if words[0] not in known:
            yield f"{path} has no command {words[0]}"
            return
        parser, path = known[words[0]], f"{path} {words.pop(0)}"
    yield from _unknown(words, {option for action in parser._actions for option in action.option_strings}, path)


def _subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0].choices) if found else {}


def _of_torchrun(words: Sequence[str], megatron: Collection[str]) -> Iterator[str]:
    """torchrun's own flags come first, then `-m simreg_megatron SCRIPT` or one of our scripts."""
    cut = next((i for i, word in enumerate(words) if word == "-m" or word.startswith("launch/")), len(words))
    yield from (f"torchrun has no {flag}" for flag in _flags(words[:cut]) if not _TORCHRUN.match(flag))
    if words[cut : cut + 1] == ["-m"]:
        yield from _of_python(words[cut:], megatron)
    elif cut < len(words):
        yield from _of_script(words[cut:], megatron)
    else:
        yield "torchrun starts nothing"


def _of_script(words: Sequence[str], megatron: Collection[str]) -> Iterator[str]:
    """A file of launch/ or tools/, and the flags of what it starts."""
    if not words or not (ROOT / words[0]).is_file():
        yield f"there is no file {' '.join(words[:1])}"
        return
    script, rest = words[0], list(words[1:])
    if script == "launch/prepare_data.sh":
        yield from _of_the_command(["data", "prepare", *rest])
    elif script == "launch/evaluate.sh":
        yield from _of_the_command(["evaluate", *rest])
    elif script == "launch/slurm/submit.sh":
        yield from _of_submit(rest, megatron)
    elif family := re.fullmatch(r"launch/pretrain_(\w+)\.sh", script):
        from launch.launcher import make_parser

        own = {option for action in make_parser(family[1])._actions for option in action.option_strings}
        yield from (f"{script} has no {flag}" for flag in _flags(rest) if not (
            flag in own or flag in megatron or _TORCHRUN.match(flag)))  # fmt: skip
    else:
        yield f"nothing is known of the flags of {script}"


def _of_submit(words: Sequence[str], megatron: Collection[str]) -> Iterator[str]:
    from launch.slurm.submit import make_submit_parser

    cut = next((i for i, word in enumerate(words) if word.startswith("launch/")), len(words))
    known = {option for action in make_submit_parser()._actions for option in action.option_strings}
    yield from _unknown(words[:cut], known, "launch/slurm/submit.sh")
    yield from _of_script(words[cut:], megatron)


def _of_python(words: Sequence[str], megatron: Collection[str]) -> Iterator[str]:
    """`python -m MODULE FLAGS`, or `python SCRIPT FLAGS` of ours."""
    if words[:2] == ["-m", "simreg_megatron"]:
        yield from _unknown(words[2:], {*megatron, "--plain", "--help"}, "Megatron")
        return
    name, rest = (words[1], words[2:]) if words[:1] == ["-m"] and len(words) > 1 else (words[0], words[1:])
    if not _exists(name):
        yield f"there is no {name}"
    elif name == "tests.flags" and "--only" in rest:  # and then one run's own
        place = rest.index("--only")
        yield from _unknown(rest[:place], options_of_module(name), f"python {name}")
        yield from _unknown(rest[place + 1 :], megatron, "Megatron")
    elif rest:
        yield from _unknown(rest, options_of_module(name), f"python {name}")


def _exists(name: str) -> bool:
    if name.endswith(".py"):
        return (ROOT / name).is_file()
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


class _Parsed(Exception):
    """Raised instead of parsing."""


@cache
def options_of_module(name: str) -> frozenset[str]:
    """The options of the parser of `python -m NAME` (or of a script): it is started, and stopped where it would parse.

    Raises:
        LookupError: it has no parser, or does its work before it parses.
    """
    found: list[argparse.ArgumentParser] = []

    def parse(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        found.append(parser)
        raise _Parsed

    if "argparse" not in _source_of(name).read_text(encoding="utf-8"):
        raise LookupError(f"{name} parses no flags")
    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse),
        mock.patch.object(argparse.ArgumentParser, "parse_known_args", parse),
        mock.patch.object(sys, "argv", [name]),
    ):
        try:
            if name.endswith(".py"):
                runpy.run_path(str(_source_of(name)), run_name="__main__")
            else:
                runpy.run_module(name, run_name="__main__")
        except _Parsed:
            pass
    if not found:
        raise LookupError(f"{name} parsed nothing")
    parsers = [found[0], *_subparsers(found[0]).values()]
    return frozenset(option for parser in parsers for action in parser._actions for option in action.option_strings)


def _source_of(name: str) -> Path:
    """The file that is started: a script, a module, or the __main__ of a package."""
    if name.endswith(".py"):
        return ROOT / name
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).with_name("__main__.py") if spec.submodule_search_locations else Path(spec.origin)
