# SPDX-License-Identifier: Apache-2.0
"""The plugin's state in a checkpoint, for any pair of settings before and after: carried over, or refused by Megatron.

Weights, Adam's and AdaGC's averages and trained scalars are compared bit for bit, over other numbers of ranks, too.
"""

import itertools
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.fixtures import snapshot
from tests.helpers.quick import quick
from tests.megatron import runs
from tests.megatron.test_adagc import ADAGC, SIMREG

STOP, STEPS, RAMP = 3, 5, 8
_FELT = ("--simreg-temperature", "0.5", "--simreg-chunk-size", "24")
SCALARS = {  # and where they start
    "simreg_similarity.query": 0.0,
    "simreg_similarity.key": 0.0,
    "simreg_sigmoid.log_t": -math.log(0.1),
    "simreg_sigmoid.bias": 0.0,
}
KINDS: dict[str, tuple[str, ...]] = {
    "without the plugin": (),
    "off": (),
    "simreg": SIMREG,
    "adagc": (*SIMREG, *ADAGC),
    "scalars": ("--simreg-objective", "simreg:10,sigmoid:5", *_FELT, "--simreg-similarity", "learnable"),
    "ramp": (*SIMREG, "--simreg-warmup-iters", f"{RAMP}"),
}
SAVED = [kind for kind in KINDS if kind != "off"]  # at lambda 0 a checkpoint is that of plain Megatron
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
RESHARDABLE = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
MOVES = {  # the layout that saves, and the one that goes on
    "one to tp2": (("", 1), (TP2, 2)),
    "tp2 to one": ((TP2, 2), ("", 1)),
    "distributed dp2 to one": ((RESHARDABLE, 2), (RESHARDABLE, 1)),
    "distributed dp2": (("--use-distributed-optimizer", 2), ("--use-distributed-optimizer", 2)),
    "older format": (("--ckpt-format torch", 1), ("--ckpt-format torch", 1)),
}
# As the launch scripts save: Megatron wants the buckets that it saved, of which this model has several.
BUCKETS = "--use-distributed-optimizer --overlap-grad-reduce --ddp-bucket-size 20000"
LAYOUTS = {**MOVES, "buckets dp2 to one": ((BUCKETS, 2), (f"{BUCKETS} --overlap-param-gather", 1))}
FROM_START, WITHOUT_AVERAGES = "--dist-ckpt-strictness log_all", "--no-load-optim"
NAMELESS = {  # where averages have no names, and what Megatron says of others
    "older format": "parameter group that doesn't match",
    "distributed dp2": "Global shape mismatch for loaded",
}
FORGOTTEN = "AdaGC: the checkpoint was written with --adagc, and this run continues without it"
LEFT_OUT = "AdaGC: --no-load-optim leaves the checkpoint's averages out, so its warm-up starts now"
WARM_UP = "AdaGC: the checkpoint has no state of it, so its warm-up starts now"


class Ran(NamedTuple):
    state: dict[str, Any]
    losses: list[float]
    output: str


class Saves:
    """The trainings that save, each run when it is first asked for."""

    def __init__(self, folder: Path, flags: tuple[str, ...]) -> None:
        self.folder, self.flags = folder, (*flags, "--lr-decay-style", "constant", "--eval-iters", "0")
        self.flags = (*self.flags, "--train-iters", f"{STEPS}", "--no-save-rng", "--no-load-rng")
        self._found: dict[Path, Ran] = {}

    def of(self, kind: str, layout: str, processes: int) -> tuple[Path, Ran]:
        out = self.folder / f"{kind} {layout}".replace(" ", "_")
        if out not in self._found:
            save = ("--save", str(out / "saved"), "--save-interval", f"{STOP}", "--exit-interval", f"{STOP}")
            done = self.train(out, kind, (*save, *layout.split()), processes)
            assert done.status == 0, done.output[-3000:]
            self._found[out] = Ran(snapshot.read(out, "end"), snapshot.losses(out), done.output)
        return out / "saved", self._found[out]

    def train(self, out: Path, kind: str, more: tuple[str, ...], processes: int) -> runs.Finished:
        flags = (*self.flags, *KINDS[kind], *more)
        plain = kind == "without the plugin"
        return runs.attempt(out, flags, processes=processes, plain=plain, patch="watch:state")


@pytest.fixture(scope="module")
def saves(data_flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Saves:
    return Saves(tmp_path_factory.mktemp("saves"), data_flags)


CASES = [*itertools.product(MOVES, SAVED, KINDS), ("buckets dp2 to one", "adagc", "adagc")]
QUICK = {("one to tp2", "scalars", "scalars"), *(("tp2 to one", "adagc", now) for now in ("adagc", "ramp", "scalars"))}


@pytest.mark.parametrize("case", quick(CASES, lambda case: case in QUICK), ids=", ".join)
def test_it_is_carried_over_or_said(case: tuple[str, str, str], saves: Saves, tmp_path: Path) -> None:
    move, before, now = case
    saving, (layout, processes) = LAYOUTS[move]
    folder, saved = saves.of(before, *saving)
    load = ("--load", str(folder), *layout.split())
    sentence, way_out = refusal(move, before, now)
    if sentence:
        refused = saves.train(tmp_path / "refused", now, load, processes)
        assert refused.status != 0 and sentence in refused.output, refused.output[-3000:]
    done = saves.train(tmp_path / "on", now, (*load, *way_out.split()), processes)
    assert done.status == 0, done.output[-3000:]
    started, losses = snapshot.read(tmp_path / "on", "start"), snapshot.losses(tmp_path / "on")
    has_averages = WITHOUT_AVERAGES not in way_out
    check_tensors(saved.state["tensors"], started["tensors"], before == now == "scalars", has_averages)
    if has_averages:  # the flag leaves the scheduler out, too
        check_adagc(saved.state["scheduler"], started["scheduler"], before, now)
        check_said(done.output, before, now)
    assert len(losses) == STEPS - STOP and all(loss < 10 for loss in losses)
    if now == "ramp":
        awaited = [10 * (step + 1) / RAMP for step in range(STOP, STEPS)]
        lambdas = [float(value) for value in re.findall(r"simreg lambda: (\S+)", done.output)]
        assert lambdas[0] == pytest.approx(awaited[0], rel=1e-6), "a ramp goes on where the step is"


def refusal(move: str, before: str, now: str) -> tuple[str, str]:
    """Return what Megatron says of scalars that only one side has, and the remedy of docs/reliability.md."""
    if (before == "scalars") == (now == "scalars"):
        return "", ""
    if now == "scalars" and move != "older format":
        return next(iter(SCALARS)), f"{FROM_START} {WITHOUT_AVERAGES}" if "distributed" in move else FROM_START
    return (NAMELESS[move], WITHOUT_AVERAGES) if move in NAMELESS else ("", "")


def check_tensors(saved: dict[Any, Any], started: dict[Any, Any], keeps_scalars: bool, keeps_averages: bool) -> None:
    """Weights and Adam's averages, bit for bit; scalars where both have them, else at their start."""
    own = {key for key in started if key[1].startswith("simreg_")}
    carried = {key for key in saved if keeps_scalars or not key[1].startswith("simreg_")}
    assert {kind for kind, _ in carried} >= {"weight", "exp_avg", "exp_avg_sq"}
    if not keeps_averages:
        assert {kind for kind, _ in started} <= {"weight", "main weight"}
        carried = {key for key in carried if key[0] == "weight"}
    assert carried <= started.keys(), carried - started.keys()
    differ = [key for key in carried if not saved[key].equal(started[key])]
    assert not differ, differ
    if keeps_scalars:
        assert {name for kind, name in own if kind == "exp_avg"} == SCALARS.keys()
        return
    for kind, name in own:
        value = started[kind, name].item()
        assert value == pytest.approx(SCALARS[name] if kind.endswith("weight") else 0.0), f"{kind} {name}"


def check_adagc(saved: dict[str, Any], started: dict[str, Any], before: str, now: str) -> None:
    state = {key: scheduler.pop("simreg_adagc", None) for key, scheduler in (("saved", dict(saved)), ("now", started))}
    others = {key: value for key, value in saved.items() if key != "simreg_adagc"}
    assert started == others
    assert (state["saved"] is not None, state["now"] is not None) == (before == "adagc", now == "adagc")
    if before == now == "adagc":
        assert state["saved"] == state["now"] and state["now"]["steps"] == STOP


def check_said(output: str, before: str, now: str) -> None:
    speaks = now != "without the plugin"
    assert (FORGOTTEN in output) == (speaks and before == "adagc" != now)
    assert (WARM_UP in output) == (now == "adagc" != before)
    knows_both = speaks and before != "without the plugin"
    said = set(re.findall(r"SimReg: (--\S+) was \S+ when the checkpoint was written", output))
    assert said - {"--simreg-objective-options"} == (changed(before, now) if knows_both else set())


def changed(before: str, now: str) -> set[str]:
    """The flags that differ, but for the options of an objective that only one side has."""
    given = [KINDS["simreg" if kind == "adagc" else kind] for kind in (before, now)]
    settings = [dict(zip(flags[::2], flags[1::2], strict=True)) for flags in given]
    found = {flag for flag in settings[0] | settings[1] if settings[0].get(flag) != settings[1].get(flag)}
    return found | ({"--adagc"} if (before == "adagc") != (now == "adagc") else set())
