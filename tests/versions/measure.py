# SPDX-License-Identifier: Apache-2.0
"""Drive one release in one way and say in a few words what came of it: the cells of the table."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tests.megatron import text
from tests.versions import compare, processes, releases, tiny
from tests.versions.compare import RunError

if TYPE_CHECKING:
    from tests.versions.loops import Loop

SMALLEST_SHARE = 0.1  # SimReg's part of the gradient below which "equals the reference" would say little
NO_TREE = "no source tree given"
SETTINGS = {"defaults": "plain", "scalars": "scalars", "several": "several"}
"""Settings that have a column of their own, and the reference's that each must equal."""
COLUMNS = ("lambda 0", *tiny.LAYOUTS, *SETTINGS)


@dataclass(frozen=True)
class Cell:
    """One answer: yes, no, or None where it was not tried; `text` says by how much, or why."""

    holds: bool | None
    text: str = ""


class Bench:
    """Releases installed below `cache`, and source trees given in `sources` or by MEGATRON_PATH."""

    def __init__(self, cache: Path, sources: Path | None) -> None:
        self.cache, self.sources = cache.resolve(), sources.resolve() if sources else None
        self.loops: dict[str, Loop] = {}  # that have run, by name

    def core(self, version: str, python: str = sys.executable) -> Path:
        """Return the folder of this release's megatron.core: its package; for main, which has none, the tree."""
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
        corpus = text.make_corpus(self.cache / "corpus")
        phrases = self.cache / "phrases"  # their ends are masked: every micro-batch has another number of tokens
        if not phrases.with_suffix(".idx").exists():
            text.cut_into_phrases(corpus, phrases)
        return (*text.flags(corpus, self.cache / "index", phrases), "--eod-mask-loss")

    @cached_property
    def reference(self) -> compare.Outcome:
        found = run_core(self, releases.REFERENCE)["one process"]
        if isinstance(found, str):
            raise RunError(f"the reference, {releases.REFERENCE}, failed: {found}")
        if compare.share(found) < SMALLEST_SHARE:
            raise RunError("SimReg is too small a part of the reference's gradient")
        return found

    def run(
        self,
        name: str,
        words: Sequence[str],
        *,
        count: int = 1,
        tree: Path | None = None,
        python: str = sys.executable,
        timeout: float = 900,
    ) -> Path:
        """Run one job and return its log; RunError, with its last error, if it failed."""
        log = self.log(name)
        path = [releases.extras(self.cache)] + ([tree] if tree else [])
        env = {"SIMREG_VERSIONS_INPUT": str(self.cache / "input.pt")}
        status = processes.run(words, processes=count, log=log, path=path, env=env, python=python, timeout=timeout)
        if status:
            late = f"no end after {timeout / 60:.0f} minutes: " if status == processes.TIMED_OUT else ""
            raise RunError(late + processes.last_error(log))
        return log

    def log(self, name: str) -> Path:
        return self.cache / "log" / f"{re.sub(r'[^A-Za-z0-9.]+', '-', name)}.log"


# megatron-core alone, by the functions of its schedule


def run_core(bench: Bench, version: str, python: str = sys.executable) -> dict[str, compare.Outcome | str]:
    """Return the result of each layout, or why there is none."""
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
    """Lambda 0 in all layouts, every layout against the reference, and some more settings in all of them."""
    found = run_core(bench, version, python)
    cells = {name: _equals(bench, outcome) for name, outcome in found.items()}
    outcomes = [outcome for outcome in found.values() if not isinstance(outcome, str)]
    same = [compare.same_bits(outcome, "absent", "zero") for outcome in outcomes]
    count = f"{sum(same)} of {len(found)} layouts" if same else str(found["one process"])
    settings = {name: _settings_equal(bench, list(found.values()), name) for name in SETTINGS}
    return {"lambda 0": Cell(len(same) == len(found) and all(same), count), **cells, **settings}


def _equals(bench: Bench, outcome: compare.Outcome | str) -> Cell:
    if isinstance(outcome, str):
        return Cell(False, outcome)
    return _told([compare.difference(bench.reference, outcome)])


def _settings_equal(bench: Bench, outcomes: Sequence[compare.Outcome | str], name: str) -> Cell:
    failed = [outcome for outcome in outcomes if isinstance(outcome, str)]
    if failed:
        return Cell(False, failed[0])
    return _told([compare.settings_apart(bench.reference, SETTINGS[name], outcome, name) for outcome in outcomes])


def _told(apart: Sequence[compare.Difference]) -> Cell:
    loss, grad = (compare.largest(getattr(one, part) for one in apart) for part in ("loss", "grad"))
    return Cell(all(one.equals for one in apart), f"{loss:.0e}, {grad:.0e}")
