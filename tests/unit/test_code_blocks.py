# SPDX-License-Identifier: Apache-2.0
"""Blocks of code of the pages: Python runs, commands and their flags exist, and shown output is what is printed."""

import argparse
import json
import os
import re
import shlex
import sys
import textwrap
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import jobs
from tests.helpers.commands import commands, complaints
from tests.helpers.pages import PAGES, ROOT, Block, blocks, name_of, spans
from tests.helpers.quick import quick_rows
from tests.megatron import runs

LANGUAGES = {"bash", "console", "python", "text", "toml", "yaml"}
BLOCKS = [block for page in PAGES for block in blocks(page)]
NOT_RUN = {
    ("docs/existing-pipeline.md", "from megatron.bridge"): "needs Megatron-Bridge; bridge_script.py has its protocol",
    ("docs/existing-pipeline.md", "from examples.heatmap"): "needs files of the probe; the demo draws its own this way",
    ("docs/objectives.md", "import numpy"): "needs files of the demo",
    ("docs/ecosystem.md", "from mcore_bridge"): "test_ecosystem.py runs it with stand-ins for ms-swift",
    ("docs/ecosystem.md", "# my_configs.py"): "needs torchtitan; test_titan.py trains with such a config",
    ("docs/ecosystem.md", "# simreg_in_automodel.py"): "needs Automodel, and test_ecosystem.py runs it with it",
    ("docs/ecosystem.md", "import torch"): "test_ecosystem.py runs it with stand-ins for slime",
}
"""Blocks of Python that are only compiled: page and first words, and why."""
ALONE = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "SIMREG_CPU": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "120"}


def at(block: Block) -> str:
    return f"{block.page}:{block.line}"


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


@pytest.mark.parametrize("block", BLOCKS, ids=at)
def test_a_block_says_what_it_is(block: Block) -> None:
    assert block.language in LANGUAGES


# ---- Python --------------------------------------------------------------------------------------------------------


def execute(given: list[Block]) -> None:
    import simreg_megatron

    os.environ |= ALONE
    names: dict[str, object] = {}
    answers = []
    for block in given:
        names = names if block.continues else {}
        try:
            exec(compile(textwrap.dedent(block.text), "block", "exec"), names)
            answers.append("")
        except Exception:
            answers.append(traceback.format_exc())
        simreg_megatron.uninstall()
    print("\n" + json.dumps(answers))


def run(given: list[Block], folder: Path) -> list[str]:
    """Return the traceback of each block, or "": in one process without a GPU, each in a namespace of its own."""
    done = runs.forked(execute, given, folder=folder)
    assert done.status == 0, done.output
    return json.loads(done.output.splitlines()[-1])


def is_run(block: Block) -> bool:
    return not any(block.page == page and block.text.startswith(first) for page, first in NOT_RUN)


@pytest.fixture(scope="module")
def tracebacks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    given = [block for block in of("python") if is_run(block)]
    return dict(zip(map(at, given), run(given, tmp_path_factory.mktemp("blocks")), strict=True))


@pytest.mark.megatron
@pytest.mark.parametrize("block", [block for block in of("python") if is_run(block)], ids=at)
def test_python_runs(block: Block, tracebacks: dict[str, str]) -> None:
    assert not tracebacks[at(block)]


@pytest.mark.parametrize(("page", "first"), NOT_RUN)
def test_python_that_is_not_run_is_there_and_compiles(page: str, first: str) -> None:
    (block,) = [block for block in of("python") if block.page == page and block.text.startswith(first)]
    compile(block.text, at(block), "exec")


# ---- commands ------------------------------------------------------------------------------------------------------


def print_flags() -> None:
    from megatron.training.arguments import add_megatron_arguments

    from simreg_megatron.config.flags import add_simreg_arguments

    parser = add_simreg_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    print("\n" + " ".join(option for action in parser._actions for option in action.option_strings))


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> frozenset[str]:
    """Megatron's flags and SimReg's, from a process of its own: the stand-ins for CUDA stay out of this one."""
    done = runs.forked(print_flags, folder=tmp_path_factory.mktemp("flags"))
    assert done.status == 0, done.output
    return frozenset(done.output.splitlines()[-1].split())


def shell_of(block: Block) -> str:
    """A console's commands stand after a $; what they print is left out."""
    if block.language == "bash":
        return block.text
    return "\n".join(line[2:] for line in block.text.splitlines() if line.startswith("$ "))


@pytest.mark.megatron
@pytest.mark.parametrize("block", of("bash", "console"), ids=at)
def test_commands_and_flags_of_a_block_exist(block: Block, megatron: frozenset[str]) -> None:
    found = list(commands(shell_of(block)))
    assert found, "a block of shell without a command"
    assert [said for words in found for said in complaints(words, megatron)] == []


OURS = ("make ", "simreg-megatron ", ".venv/bin/simreg-megatron ", "python -m ", "bash launch/", "torchrun launch/")


def commands_in_words(page: Path) -> Iterator[tuple[int, str]]:
    for line, text in spans(page):
        if text.startswith(OURS):
            yield line, text


@pytest.mark.megatron
@pytest.mark.parametrize("page", [page for page in PAGES if any(commands_in_words(page))], ids=name_of)
def test_commands_and_flags_between_words_exist(page: Path, megatron: frozenset[str]) -> None:
    given = [(line, words) for line, text in commands_in_words(page) for words in commands(text)]
    assert [f"{line}: {said}" for line, words in given for said in complaints(words, megatron)] == []


# ---- output --------------------------------------------------------------------------------------------------------


def sessions(block: Block) -> Iterator[tuple[str, str]]:
    """Each command of a console with what the page shows below it; `...` stands for any lines."""
    for part in block.text.split("$ ")[1:] if block.text.startswith("$ ") else []:
        command, _, shown = part.partition("\n")
        yield command, shown


def is_shown(shown: str, printed: str) -> bool:
    """Return whether the page's lines are the printed ones, a line of ... standing for any number of them."""
    text = "\n".join(line.rstrip() for line in printed.strip("\n").splitlines())
    parts = shown.rstrip("\n").split("\n...\n")
    return bool(re.fullmatch("\n(?:.*\n)?".join(map(re.escape, parts)), text, re.DOTALL))


CONSOLES = [(block, command, shown) for block in of("console") for command, shown in sessions(block)]
NAMES = [f"{at(block)} {command}" for block, command, _ in CONSOLES]
SHOWN = quick_rows(CONSOLES, lambda row: not row[1].startswith("bash launch/"))  # those import Megatron


@pytest.mark.parametrize(("block", "command", "shown"), SHOWN, ids=NAMES)
def test_output_is_what_the_command_prints(block: Block, command: str, shown: str) -> None:
    environment = {name: value for name, value in ALONE.items() if name not in ("MAKELEVEL", "MAKEFLAGS", "MFLAGS")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    words = shlex.split(command.replace(".venv/bin/", ""))
    done = jobs.run(words, cwd=ROOT, env=environment)
    printed = done.stdout + done.stderr
    assert is_shown(shown, printed), f"{at(block)} shows something else; it should be\n{printed}"
