# SPDX-License-Identifier: Apache-2.0
"""Drive one release in one way and say in a few words what came of it: the cells of the table."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.megatron import runs, text
from tests.versions import compare, patches, processes, releases, tiny
from tests.versions.compare import RunError

_OWN_SCRIPT = Path(__file__).resolve().with_name("pretrain.py")
_SMALLEST_SHARE = 0.1  # SimReg's part of the gradient below which "equals the reference" would say little
_PARALLEL = {"one process": (), "TP 2 + SP": ("--tensor-model-parallel-size", "2", "--sequence-parallel")}
_NUM_STEPS = 3
_STEPS = ("--train-iters", str(_NUM_STEPS), "--eval-iters", "0")
_NO_TREE = "no source tree given"
Record = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One answer: yes, no, or None where it was not tried; `text` says by how much, or why."""

    holds: bool | None
    text: str = ""


class Bench:
    """Releases installed below `cache`, and source trees given in `sources` or by MEGATRON_PATH."""

    def __init__(self, cache: Path, sources: Path | None) -> None:
        self.cache, self.sources = cache.resolve(), sources.resolve() if sources else None

    def core(self, version: str, python: str = sys.executable) -> Path:
        """Where this release's megatron.core lies: its package; for main, which has none, the tree."""
        tree = self.tree(version) if version == "main" else None
        return tree or releases.installed(version, self.cache, python)

    def tree(self, version: str) -> Path | None:
        return releases.working_tree(version, self.sources, self.cache)

    @cached_property
    def given(self) -> Path:
        """Weights, text and mask for every release, made by the reference."""
        path = self.cache / "input.pt"
        if not path.exists():
            core = self.core(releases.REFERENCE)
            self.run("input", ["-m", "tests.versions.inputs", str(core), str(self.cache / "corpus"), str(path)])
        return path

    @cached_property
    def text_flags(self) -> tuple[str, ...]:
        assert self.given.exists()  # the corpus was made with it
        return text.flags(text.make_corpus(self.cache / "corpus"), self.cache / "index")

    @cached_property
    def reference(self) -> compare.Outcome:
        found = run_core(self, releases.REFERENCE)["one process"]
        if isinstance(found, str):
            raise RunError(f"the reference, {releases.REFERENCE}, failed: {found}")
        if compare.share(found) < _SMALLEST_SHARE:
            raise RunError("SimReg is too small a part of the reference's gradient")
        return found

    @cached_property
    def loop_reference(self) -> Record:
        return _wheel_loop(self, releases.REFERENCE, "one process")

    def run(
        self,
        name: str,
        words: Sequence[str],
        *,
        count: int = 1,
        tree: Path | None = None,
        python: str = sys.executable,
    ) -> Path:
        """Run one job; its log.

        Raises:
            RunError: it failed; the message is its last error.
        """
        log = self.log(name)
        path = [releases.extras(self.cache)] + ([tree] if tree else [])
        env = {"SIMREG_VERSIONS_INPUT": str(self.cache / "input.pt")}
        status = processes.run(words, processes=count, log=log, path=path, env=env, python=python)
        if status:
            late = "no end after five minutes: " if status == processes.TIMED_OUT else ""
            raise RunError(late + processes.last_error(log))
        return log

    def log(self, name: str) -> Path:
        return self.cache / "log" / f"{re.sub(r'[^A-Za-z0-9.]+', '-', name)}.log"


# megatron-core alone, by the functions of its schedule


def run_core(bench: Bench, version: str, python: str = sys.executable) -> dict[str, compare.Outcome | str]:
    """What each layout computed, or why it did not."""
    by_count: dict[int, list[str]] = {}
    for name, layout in tiny.LAYOUTS.items():
        by_count.setdefault(layout.processes, []).append(name)
    found: dict[str, compare.Outcome | str] = {}
    for count, names in by_count.items():
        while names:  # one that fails ends its processes: those after it go on in new ones
            done = _run_layouts(bench, version, names, count, python)
            found |= done
            names = names[len(done) :]
    return found


def _run_layouts(
    bench: Bench, version: str, names: Sequence[str], count: int, python: str
) -> dict[str, compare.Outcome | str]:
    """The layouts up to the first that fails, in the processes of one job."""
    title = " ".join([version, *([] if python == sys.executable else [releases.python_version(python)]), "core"])
    out = bench.cache / "out" / title
    for name in names:
        shutil.rmtree(out / name, ignore_errors=True)
    words = ["-m", "tests.versions.driver", str(bench.core(version, python)), str(bench.given), str(out), *names]
    failure = ""
    try:
        bench.run(f"{title} {names[0]}", words, count=count, python=python)
    except RunError as error:
        failure = str(error)
    found: dict[str, compare.Outcome | str] = {}
    for name in names:
        try:
            found[name] = compare.read(out / name, count)
        except RunError as error:
            return {**found, name: str(error) if (out / name).exists() else failure or str(error)}
    return found


def core_cells(bench: Bench, version: str, python: str = sys.executable) -> dict[str, Cell]:
    """Every layout against the reference, and lambda 0 in all of them."""
    found = run_core(bench, version, python)
    cells = {name: _equals(bench, outcome) for name, outcome in found.items()}
    outcomes = [outcome for outcome in found.values() if not isinstance(outcome, str)]
    same = [compare.same_bits(outcome, "absent", "zero") for outcome in outcomes]
    count = f"{sum(same)} of {len(found)} layouts" if same else str(found["one process"])
    return {"lambda 0": Cell(len(same) == len(found) and all(same), count), **cells}


def _equals(bench: Bench, outcome: compare.Outcome | str) -> Cell:
    if isinstance(outcome, str):
        return Cell(False, outcome)
    apart = compare.difference(bench.reference, outcome)
    return Cell(apart.equals, f"{apart.loss:.0e}, {apart.grad:.0e}")


# Megatron's own training loop, from the wheel


def has_loop(version: str) -> bool:
    """Whether the wheel of this release carries megatron.training."""
    return tuple(map(int, version.split(".")[:2])) >= (0, 17)


def wheel_cell(bench: Bench, version: str) -> Cell:
    """Three steps on the weights and the text of all releases, one process and TP 2 + SP, against the reference's."""
    if version == "main":
        return Cell(None, "main has no wheel")
    if not has_loop(version):
        return Cell(None, "its wheel has no megatron.training")
    try:
        loops = (_wheel_loop(bench, version, layout) for layout in _PARALLEL)
        apart = compare.largest(_loops_apart(bench.loop_reference, loop) for loop in loops)
    except RunError as error:
        return Cell(False, str(error))
    return Cell(apart <= compare.TOLERANCE, f"{apart:.0e}")


def _wheel_loop(bench: Bench, version: str, layout: str) -> Record:
    text_flags = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "512", "--dataloader-type", "single")
    flags = runs.all_flags([*text_flags, *_STEPS, *_PARALLEL[layout]], "deep")
    assert bench.given.exists()
    return _recorded(bench, f"{version} wheel {layout}", layout, bench.core(version), _OWN_SCRIPT, flags)


def _loops_apart(one: Record, other: Record) -> float:
    pairs = [(a, b) for key in ("losses", "norms") for a, b in zip(one[key], other[key], strict=True)]
    return compare.largest(abs(a - b) / abs(a) for a, b in pairs)


def _recorded(bench: Bench, name: str, layout: str, folder: Path, script: Path, flags: Sequence[str]) -> Record:
    """Run without the plugin, with it at lambda 0, and with SimReg on; the record of the last.

    Raises:
        RunError: a run failed, lambda 0 is not the plugin's absence bit for bit, or SimReg changes too little.
    """
    absent = _record(bench, f"{name} absent", layout, folder, script, flags)
    if _record(bench, f"{name} zero", layout, folder, script, flags) != absent:
        raise RunError(f"{layout}: lambda 0 differs from the plugin's absence")
    on = _record(bench, f"{name} on", layout, folder, script, [*flags, *runs.SIMREG])
    if abs(on["norms"][0] - absent["norms"][0]) < _SMALLEST_SHARE * absent["norms"][0]:
        raise RunError(f"{layout}: SimReg changes too little")
    return on


def _record(bench: Bench, name: str, layout: str, folder: Path, script: Path, flags: Sequence[str]) -> Record:
    """Losses and gradient norms of every step, and a digest of the parameters after the last, on the first rank."""
    count, plugin = tiny.LAYOUTS[layout].processes, "absent" if name.endswith("absent") else "installed"
    out = bench.cache / "out" / name
    shutil.rmtree(out, ignore_errors=True)
    words = ["-m", "tests.versions.record", str(folder), plugin, str(out), str(script), *flags]
    bench.run(name, words, count=count)
    ranks = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(count)]
    return {**ranks[0], "params": [rank["params"] for rank in ranks]}


# A source tree's own script and loop


def tree_cell(bench: Bench, version: str) -> Cell:
    """Its own pretrain_gpt.py on real text, one process and TP 2 + SP; SimReg on as a user starts it."""
    tree = bench.tree(version)
    if tree is None:
        return Cell(None, _NO_TREE)
    said: list[list[float]] = []
    try:
        for layout in _PARALLEL:
            script, flags = tree / "pretrain_gpt.py", _tree_flags(bench, layout)
            _recorded(bench, f"{version} tree {layout}", layout, tree, script, flags)
            said.append(_by_the_command(bench, _command_name(version, layout), layout, tree, flags))
    except RunError as error:
        return Cell(False, str(error))
    return Cell(True, f"simreg loss {said[0][-1]:.6f}")


def _command_name(version: str, layout: str) -> str:
    return f"{version} tree {layout} command"


def _tree_flags(bench: Bench, layout: str) -> list[str]:
    return runs.all_flags([*bench.text_flags, *_STEPS, *_PARALLEL[layout]])


def _by_the_command(bench: Bench, name: str, layout: str, tree: Path, flags: Sequence[str]) -> list[float]:
    """`python -m simreg_megatron pretrain_gpt.py ... --simreg-cpu`: what its log says."""
    words = ["-m", "simreg_megatron", str(tree / "pretrain_gpt.py"), *flags, *runs.SIMREG, "--simreg-cpu"]
    return _logged(bench.run(name, words, count=tiny.LAYOUTS[layout].processes, tree=tree))


def _logged(log: Path) -> list[float]:
    """The "simreg loss" of every step of a training log.

    Raises:
        RunError: it is missing, or missing in a step.
    """
    values = [float(value) for value in re.findall(r"simreg loss: (\S+)", log.read_text(errors="replace"))]
    if len(values) < _NUM_STEPS:
        raise RunError("the log has no simreg loss")
    return values


def patch_cell(bench: Bench, version: str) -> Cell:
    """The patch of the release line on a copy of its tree: the patched script must do what `-m simreg_megatron` did."""
    tree = bench.tree(version)
    if tree is None:
        return Cell(None, _NO_TREE)
    try:
        patches.check(patches.patch_for(version), tree)
        flags = [*_tree_flags(bench, "one process"), *runs.SIMREG]
        words = ["-m", "tests.versions.patched", str(tree / "pretrain_gpt.py"), *flags]
        patched = _logged(bench.run(f"{version} patched", words, tree=tree))
        by_command = _logged(bench.log(_command_name(version, "one process")))
    except (patches.PatchError, RunError, FileNotFoundError) as error:
        return Cell(False, str(error))
    if patched != by_command:
        return Cell(False, f"simreg loss {patched[-1]:.6f}, not {by_command[-1]:.6f}")
    return Cell(True, f"simreg loss {patched[-1]:.6f}")
