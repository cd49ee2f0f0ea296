# SPDX-License-Identifier: Apache-2.0
"""Megatron's own training loop, from the wheel or from a source tree with its own script: the cells of both.

A loop makes five runs on one process and five with TP 2 + SP: without the plugin, with it at lambda 0, with SimReg on,
with all that has a state of its own (`STATEFUL`) while it saves a checkpoint, and from that checkpoint on.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.megatron import runs
from tests.versions import compare, expected, patches, processes, record, releases, tiny
from tests.versions.compare import RunError
from tests.versions.inputs import CHUNK
from tests.versions.measure import NO_TREE, SMALLEST_SHARE, Bench, Cell

COLUMNS = ("loop of the wheel", "loop of the source tree", "AdaGC", "resume", "patch")
_OWN_SCRIPT = Path(__file__).resolve().with_name("pretrain.py")
_LAYOUTS: dict[str, tuple[str, ...]] = {
    "one process": (),
    "TP 2 + SP": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
}
TEMPERATURE, LAMBDA_REL, BETA, WARMUP = 0.5, 0.9, 0.8, 1
_CHUNKS = ("--simreg-temperature", f"{TEMPERATURE}", "--simreg-chunk-size", f"{CHUNK}")
SIMREG = ("--simreg-lambda", "10", *_CHUNKS)
STATEFUL = (
    *("--simreg-objective", "simreg:10,sigreg:0.3", *_CHUNKS),  # sigreg draws directions by the iteration
    *("--simreg-similarity", "learnable", "--simreg-warmup-iters", "3"),  # scalars and their optimizer's state, a ramp
    # A limit below the average: every step after the warm-up clips many parameters.
    *("--adagc", "--adagc-lambda-rel", f"{LAMBDA_REL}", "--adagc-beta", f"{BETA}", "--adagc-warmup-iters", f"{WARMUP}"),
)
_NUM_STEPS, _SAVED_AT, _LAST = 3, 2, 4
_MINUTES = 20.0  # for all runs of a loop; each has five of its own
Record = dict[str, Any]


class Loop(NamedTuple):
    """One release's loop: what it is started with, and where its runs lie."""

    name: str  # "0.13.1 tree"
    folder: Path  # with its `megatron`
    script: Path
    flags: Sequence[str]
    out: Path

    def flags_in(self, layout: str) -> list[str]:
        return [*self.flags, *_LAYOUTS[layout]]

    def place(self, layout: str, variant: str) -> Path:
        return self.out / f"{layout} {variant}"

    def read(self, layout: str, variant: str) -> Record:
        """Join the record of a run to the whole model's; RunError if it failed."""
        return read(self.place(layout, variant), tiny.LAYOUTS[layout].processes)


# The runs -------------------------------------------------------------------------------------------------------------


def _run_all(bench: Bench, loop: Loop) -> Loop:
    """All runs of a loop, in the processes of one job; what became of each is read later."""
    shutil.rmtree(loop.out, ignore_errors=True)
    loop.out.mkdir(parents=True)
    todo = [run for layout in _LAYOUTS for run in _runs(loop, layout)]
    (loop.out / "runs.json").write_text(json.dumps(todo))
    words = ["-m", "tests.versions.record", str(loop.folder), str(loop.out / "runs.json")]
    bench.run(loop.name, words, timeout=60 * _MINUTES)
    return loop


def _runs(loop: Loop, layout: str) -> Iterator[record.Run]:
    saved = str(loop.place(layout, "checkpoint"))
    steps = ("--train-iters", f"{_NUM_STEPS}")
    more = (*STATEFUL, "--train-iters", f"{_LAST}")
    variants = {
        "absent": steps,
        "zero": steps,
        "on": (*SIMREG, *steps),
        "saving": (*more, "--save", saved, "--save-interval", f"{_SAVED_AT}"),
        "resumed": (*more, "--load", saved, "--ckpt-step", f"{_SAVED_AT}"),
    }
    for variant, flags in variants.items():
        yield record.Run(
            out=str(loop.place(layout, variant)),
            processes=tiny.LAYOUTS[layout].processes,
            installed=variant != "absent",
            script=str(loop.script),
            flags=[*loop.flags_in(layout), *flags],
        )


def read(folder: Path, count: int) -> Record:
    """Join the records of one run's ranks to the whole model's; RunError, with its last error, if one is missing."""
    paths = [folder / f"rank{rank}.pt" for rank in range(count)]
    if not all(path.exists() for path in paths):
        raise RunError(f"{folder.name}: {processes.last_error(folder / 'log')}")
    ranks = [torch.load(path, weights_only=True) for path in paths]
    states = [
        [_joined_states(parts) for parts in zip(*step, strict=True)]
        for step in zip(*(rank["states"] for rank in ranks), strict=True)
    ]
    clipped = [
        {name: _joined_norms(name, ranks, step) for name in ranks[0]["clipped"][step]}
        for step in range(len(ranks[0]["clipped"]))
    ]
    params = [rank["params"] for rank in ranks]
    return {**ranks[0], "params": params, "states": states, "clipped": clipped, "simreg": logged(folder / "log")}


def _joined_states(parts: Sequence[Record]) -> Record:
    """Sequence parallelism cuts the hidden states, not the labels."""
    return {**parts[0], "hidden": torch.cat([part["hidden"] for part in parts])}


def _joined_norms(name: str, ranks: Sequence[Record], step: int) -> tuple[float, float]:
    """(before, after) of the whole parameter's gradient, from those of its shards."""
    shards = [rank["clipped"][step][name] for rank in ranks][: ranks[0]["shards"][name][2]]
    before, after = (sum(norm**2 for norm in norms) ** 0.5 for norms in zip(*shards, strict=True))
    return before, after


def logged(log: Path) -> list[float]:
    """The "simreg loss" of every step of a training log; none where the run has no SimReg."""
    return [float(value) for value in re.findall(r"simreg loss: (\S+)", log.read_text(errors="replace"))]


# What they show -------------------------------------------------------------------------------------------------------


def cells(bench: Bench, version: str) -> dict[str, Cell]:
    ran: dict[str, Loop] = {}
    failed: dict[str, Cell] = {}
    for kind, start in (("wheel", wheel_loop), ("tree", tree_loop)):
        try:
            found = start(bench, version)
        except (RunError, releases.ReleaseError) as error:
            found = Cell(False, str(error))
        (ran if isinstance(found, Loop) else failed)[kind] = found  # type: ignore[index]
    return {
        "loop of the wheel": failed.get("wheel") or _judged(lambda: wheel(bench, ran["wheel"])),
        "loop of the source tree": failed.get("tree") or _judged(lambda: tree(bench, ran["tree"])),
        "AdaGC": _judged(lambda: _of_each(ran, adagc)) if ran else failed["tree"],
        "resume": _judged(lambda: _of_each(ran, resume)) if ran else failed["tree"],
        "patch": failed.get("tree") or _judged(lambda: patch(bench, ran["tree"], version)),
    }


def _judged(check: Callable[[], str]) -> Cell:
    """A check raises what is wrong, or says how well it holds."""
    try:
        return Cell(True, check())
    except (RunError, patches.PatchError) as error:
        return Cell(False, str(error))


def _of_each(ran: Mapping[str, Loop], check: Callable[[Loop], str]) -> str:
    return ", ".join(f"{kind} {check(loop)}".strip() for kind, loop in ran.items())


def has_loop(version: str) -> bool:
    """Return whether the wheel of this release carries megatron.training."""
    return version != "main" and tuple(map(int, version.split(".")[:2])) >= (0, 17)


def wheel_loop(bench: Bench, version: str) -> Loop | Cell:
    """The loop of the wheel after all its runs, on the weights and the text of all releases; or why there is none."""
    if not has_loop(version):
        return Cell(None, "main has no wheel" if version == "main" else "its wheel has no megatron.training")
    text_flags = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "512", "--dataloader-type", "single")
    flags = runs.all_flags([*text_flags, "--eval-iters", "0"], "deep")
    assert bench.given.exists()
    return _run_once(bench, f"{version} wheel", bench.core(version), _OWN_SCRIPT, flags)


def tree_loop(bench: Bench, version: str) -> Loop | Cell:
    """The loop of a source tree after all its runs of its own pretrain_gpt.py; or why there is none."""
    tree = bench.tree(version)
    if tree is None:
        return Cell(None, NO_TREE)
    # In any format but the old one 0.12 does not know torch 2.13, and 0.15 compiles for a GPU while it saves.
    old = ("--ckpt-format", "torch") if releases.line_of(version) in ("0.12", "0.15") else ()
    flags = runs.all_flags([*bench.text_flags, "--eval-iters", "0", *old])
    return _run_once(bench, f"{version} tree", tree, tree / "pretrain_gpt.py", flags)


def _run_once(bench: Bench, name: str, folder: Path, script: Path, flags: Sequence[str]) -> Loop:
    if name not in bench.loops:
        bench.loops[name] = _run_all(bench, Loop(name, folder, script, flags, bench.cache / "out" / name))
    return bench.loops[name]


def wheel(bench: Bench, loop: Loop) -> str:
    """Losses and norms of the reference's loop, also with all that has a state, and SimReg's value by formula."""
    reference = wheel_loop(bench, releases.REFERENCE)
    assert isinstance(reference, Loop)
    apart = compare.largest(
        _steps_apart(reference.read("one process", variant), loop.read(layout, variant))
        for variant in ("on", "saving")
        for layout in _LAYOUTS
    )
    _require(apart, "a loss or a gradient norm")
    return f"{apart:.0e}, {value_apart(loop):.0e}"


def tree(bench: Bench, loop: Loop) -> str:
    """SimReg's value by formula; the very same values where a user's command starts the script."""
    apart = value_apart(loop)
    for layout in _LAYOUTS:
        said = _by_the_command(bench, loop, layout)
        if said != _on(loop, layout)["simreg"]:
            raise RunError(f"{layout}: python -m simreg_megatron logs {said}")
    return f"{apart:.0e}"


def _by_the_command(bench: Bench, loop: Loop, layout: str) -> list[float]:
    """`python -m simreg_megatron pretrain_gpt.py ... --simreg-cpu`: what its log says."""
    flags = [*loop.flags_in(layout), *SIMREG, "--train-iters", f"{_NUM_STEPS}", "--simreg-cpu"]
    words = ["-m", "simreg_megatron", str(loop.script), *flags]
    count = tiny.LAYOUTS[layout].processes
    return logged(bench.run(f"{loop.name} {layout} command", words, count=count, tree=loop.folder))


def _on(loop: Loop, layout: str) -> Record:
    """The run with SimReg; RunError if one failed, lambda 0 changes a bit, or SimReg changes too little."""
    absent, zero, on = (loop.read(layout, variant) for variant in ("absent", "zero", "on"))
    if any(absent[key] != zero[key] for key in ("losses", "norms", "clipped", "params")):
        raise RunError(f"{layout}: lambda 0 differs from the plugin's absence")
    if abs(on["norms"][0] - absent["norms"][0]) < SMALLEST_SHARE * absent["norms"][0]:
        raise RunError(f"{layout}: SimReg changes too little")
    return on


def value_apart(loop: Loop) -> float:
    """Compare the logged SimReg of each step with that of the states which the output layer was given."""
    differences = []
    for layout in _LAYOUTS:
        on = _on(loop, layout)
        if len(on["simreg"]) != _NUM_STEPS:
            raise RunError(f"{layout}: the log has {len(on['simreg'])} values of SimReg in {_NUM_STEPS} steps")
        values = [expected.simreg_of(line, temperature=TEMPERATURE, chunk_size=CHUNK) for line in on["states"]]
        differences += [abs(a - b) / a for a, b in zip(values, on["simreg"], strict=True)]
    apart = compare.largest(differences)
    _require(apart, "SimReg's value")
    return apart


def _steps_apart(one: Record, other: Record) -> float:
    pairs = [(a, b) for key in ("losses", "norms") for a, b in zip(one[key], other[key], strict=True)]
    return compare.largest(abs(a - b) / abs(a) for a, b in pairs)


def _require(apart: float, what: str) -> None:
    if not apart <= compare.TOLERANCE:
        raise RunError(f"{what} is {apart:.0e} off")


def adagc(loop: Loop) -> str:
    """Compare every gradient between its preparation and the step with AdaGC's formula."""
    differences = []
    for layout in _LAYOUTS:
        steps = loop.read(layout, "saving")["clipped"]
        before = [{name: norms[0] for name, norms in step.items()} for step in steps]
        coefficients = expected.adagc_of(before, lambda_rel=LAMBDA_REL, beta=BETA, warmup=WARMUP)
        if len(set(coefficients[-1].values())) < len(coefficients[-1]) / 2:
            raise RunError(f"{layout}: AdaGC has too little to clip")
        differences += [
            abs(after / norm / coefficients[number][name] - 1)
            for number, step in enumerate(steps)
            for name, (norm, after) in step.items()
        ]
    apart = compare.largest(differences)
    _require(apart, "a gradient's norm behind AdaGC")
    return f"{apart:.0e}"


def resume(loop: Loop) -> str:
    """Bit for bit: losses, norms, what AdaGC did in each step, and the parameters at the end."""
    for layout in _LAYOUTS:
        whole, resumed = (loop.read(layout, variant) for variant in ("saving", "resumed"))
        if len(whole["norms"]) != _LAST or len(resumed["norms"]) != _LAST - _SAVED_AT:
            raise RunError(f"{layout}: {len(resumed['norms'])} steps after the resume, {len(whole['norms'])} without")
        differ = [key for key in ("losses", "norms", "clipped") if whole[key][_SAVED_AT:] != resumed[key]]
        differ += ["params"] * (whole["params"] != resumed["params"])
        if differ:
            raise RunError(f"{layout}: the resumed run has other {' and '.join(differ)}")
    return ""


def patch(bench: Bench, loop: Loop, version: str) -> str:
    """The patch of the release line on the copy of its tree: the patched script does what the command did."""
    patches.check(patches.patch_for(version), loop.folder)
    flags = [*loop.flags_in("one process"), *SIMREG, "--train-iters", f"{_NUM_STEPS}"]
    words = ["-m", "tests.versions.patched", str(loop.script), *flags]
    patched = logged(bench.run(f"{loop.name} patched", words, tree=loop.folder))
    installed = loop.read("one process", "on")["simreg"]
    if not patched or patched != installed:
        raise RunError(f"it logs {patched}, not {installed}")
    return f"simreg loss {patched[-1]:.6f}"
