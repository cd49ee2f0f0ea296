# SPDX-License-Identifier: Apache-2.0
"""Imports are law: which room of the package may import what, read from the syntax tree of every module.

A room is a folder or a module right under `simreg_megatron/`. The table names the other rooms that it may use
(arrows point downwards only) and the packages of others that it may import, inside functions included.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers import jobs


def module_imports(path: Path) -> set[str]:
    """Other modules of this repository that one imports, inside functions included."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for _, name in imported_names(tree, ".".join(path.relative_to(ROOT.parent).parent.parts)):
        for candidate in (name, name.rpartition(".")[0]):
            if (ROOT.parent / (file := candidate.replace(".", "/") + ".py")).is_file():
                found.add(file)
                break
    return found


PACKAGE = "simreg_megatron"
ROOT = Path(__file__).resolve().parents[2] / PACKAGE
TOP = "__init__"  # the room of names taken from the package itself: install, uninstall, __version__


@dataclass(frozen=True)
class Room:
    rooms: frozenset[str]  # of ours, except itself
    packages: frozenset[str]  # of others; the standard library is open to all


def room(rooms: str = "", packages: str = "") -> Room:
    return Room(frozenset(rooms.split()), frozenset(packages.split()))


# Only adagc, cpu, loop, plugin, pretrain and tools may name megatron; triton lives in kernels alone.
LAW = {
    "objectives": room(),
    "config": room("cpu notices objectives"),
    "kernels": room(packages="torch triton"),
    "losses": room("kernels notices objectives", "torch"),
    "notices": room(packages="torch"),
    "adagc": room("config notices", "torch megatron"),
    "parallel": room("config kernels losses notices objectives", "numpy torch"),
    "contrib": room("config kernels losses notices objectives parallel", "torch"),
    "cpu": room(packages="torch megatron transformer_engine"),
    "plugin": room("adagc config cpu kernels losses notices objectives parallel", "torch megatron apex wandb"),
    TOP: room("config plugin"),
    "loop": room("config losses notices parallel plugin", "torch megatron torchtitan spmd_types"),
    "pretrain": room("config plugin", "torch megatron"),
    "__main__": room("cpu plugin", "megatron"),
    "tools": room(
        "cpu notices",
        "torch megatron numpy datasets sentencepiece transformers tokenizers safetensors huggingface_hub lm_eval "
        "filelock matplotlib tensorboard zstandard",
    ),
    "cli": room("config cpu losses notices plugin tools", "torch"),
}


def imported_names(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import in the tree, at any depth; `package` resolves relative ones."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def offences(source: str, path: str) -> list[str]:
    """List the forbidden imports of the module at `path`, such as "losses/simreg.py" in the package."""
    parts = Path(path).with_suffix("").parts
    own = parts[0]
    if own not in LAW:
        return [f"{path}: the room {own} is not in the table: add it to LAW."]
    law = LAW[own]
    package = ".".join([PACKAGE, *parts[:-1]])
    found = []
    for line, name in imported_names(ast.parse(source), package):
        head, *rest = name.split(".")
        if head == PACKAGE:
            target = rest[0] if rest and rest[0] in LAW else TOP
            lawful = target == own or target in law.rooms
        else:
            lawful = head in sys.stdlib_module_names or head in law.packages
        if not lawful:
            found.append(f"{path}:{line}: {own} must not import {name}")
    return found


MODULES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES)
def test_every_module_keeps_the_law(path: str):
    assert offences((ROOT / path).read_text(encoding="utf-8"), path) == []


def test_the_table_itself_points_downwards_only():
    """No two rooms may use each other, over however many steps."""
    assert not circles({name: set(law.rooms) for name, law in LAW.items()})


def test_there_are_fifteen_rooms_on_six_levels():
    def level(name: str) -> int:
        return 1 + max(map(level, LAW[name].rooms), default=0)

    assert set(LAW) - {TOP} == {path.split("/")[0].removesuffix(".py") for path in MODULES} - {TOP}
    assert len(LAW.keys() - {TOP}) <= 15 and max(map(level, LAW)) <= 6


def circles(below: dict[str, set[str]]) -> set[str]:
    """Return the modules that import each other in a circle."""
    while True:
        leaves = {name for name, uses in below.items() if not uses & below.keys()}
        if not leaves:
            return set(below)
        below = {name: uses for name, uses in below.items() if name not in leaves}


def test_importing_the_package_stays_light():
    """`import simreg_megatron` must be safe before the CPU backend is chosen, and without Megatron."""
    made = "import sys, simreg_megatron; simreg_megatron.SimRegConfig(lambda_=1); "
    heavy = "print(sorted({'torch', 'megatron', 'triton', 'simreg_megatron.contrib'} & sys.modules.keys()))"
    done = jobs.run([sys.executable, "-c", made + heavy], cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_no_module_imports_itself_by_way_of_others():
    top = ROOT.parent
    paths = [path for room in (PACKAGE, "launch", "research", "benchmarks") for path in (top / room).rglob("*.py")]
    imports = {path.relative_to(top).as_posix(): module_imports(path) for path in paths}
    assert not circles(imports)
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == {"a", "b", "c"}
    assert "simreg_megatron/kernels/contrast.py" in imports["simreg_megatron/kernels/triton.py"]
    assert {"launch/plan.py", "launch/preflight.py"} <= imports["launch/launcher.py"]
