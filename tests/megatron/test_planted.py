# SPDX-License-Identifier: Apache-2.0
"""NaN or infinity in one rank's weight, states, gradient, loss mask or term: the step never reaches the optimizer.

Every objective in every kind of layout, under three guards: Megatron's own check, which ends the run; AdaGC and fp16,
which leave the step out on every rank. No weight and no average of any rank may change.
"""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from simreg_megatron.objectives import BUILT_IN, Kind, find
from tests.helpers.quick import quick
from tests.megatron import runs
from tests.megatron.parity.run import Bench
from tests.megatron.plant import PLACES
from tests.megatron.test_adagc import ADAGC, start

TP2 = "--tensor-model-parallel-size 2"
LAYOUTS = {  # the model, the flags, the processes, and the rank that is struck: one that has a loss mask of its own
    "one": ("dense", "", 1, 0),
    "tp2": ("dense", TP2, 2, 1),
    "tp2-sp": ("dense", f"{TP2} --sequence-parallel", 2, 1),
    "pp2": ("dense", "--pipeline-model-parallel-size 2", 2, 1),
    "pp2-first": ("dense", "--pipeline-model-parallel-size 2", 2, 0),
    "cp2": ("dense", "--context-parallel-size 2", 2, 1),
    "dp2-distributed": ("dense", "--use-distributed-optimizer", 2, 1),
    "ep2": ("moe", "--expert-model-parallel-size 2", 2, 1),
}
OBJECTIVES = [name for name in BUILT_IN if name != "none"]
ALONE = [*(name for name in OBJECTIVES if find(name).kind is Kind.HEAD), "cpretrain"]
"""Those in which the state that is struck meets no other: CPretrain has it in no pair."""
EVERY_TOKEN = {"dispersion": "tokens=64"}  # else the state that is struck is in some samples and not in others
AT_EVERY_PLACE = ("simreg", "simcse", "prefixes-ce")  # pairs of tokens, sequences, the output layer
UNCHECKED = ("--no-check-for-nan-in-loss-and-grad",)
GUARDS = {
    "none": UNCHECKED,
    "check": (),
    "adagc": (*ADAGC, *UNCHECKED),
    "fp16": ("--fp16", "--initial-loss-scale", "1024", *UNCHECKED),
}
NUMBERS = ("nan", "inf")
SENTENCES = (r"found (NaN|Inf) in local (forward loss|grad norm)",)  # of Megatron
OURS = "the SimReg term is not finite while the language-model loss is: the step is stopped"


GATHERED = "simcse-gather"
"""Compares with the sequences of all replicas."""


def flags_of(name: str) -> tuple[str, ...]:
    if name == GATHERED:
        return (*flags_of("simcse"), "--simreg-objective-options", "gather=yes")
    example = find(name).example
    chunk = () if example.chunk_size is None else ("--simreg-chunk-size", f"{example.chunk_size}")
    given = EVERY_TOKEN.get(name, example.options)
    options = ("--simreg-objective-options", given) if given else ()
    temperature = ("--simreg-temperature", "0.5") if find(name).temperature is not None else ()
    return ("--simreg-objective", name, "--simreg-lambda", f"{example.weight:g}", *chunk, *options, *temperature)


def planted(
    out: Path, bench: Bench, layout: str, objective: str, guard: str, steps: list[tuple[str, str]]
) -> tuple[runs.Finished, list[list[dict[str, Any]]]]:
    model, split, processes, rank = LAYOUTS[layout]
    out.mkdir(parents=True)
    (out / "plan.json").write_text(json.dumps({"rank": rank, "steps": steps}))
    flags = (*start(bench, model, len(steps)), *flags_of(objective), *GUARDS[guard], *split.split())
    done = runs.attempt(out, flags, model=model, processes=processes, patch="plant:numbers")
    reports = [json.loads(path.read_text()) for path in sorted(out.glob("planted*.json"))]
    return done, reports


ACROSS_REPLICAS = ("dp2-distributed", GATHERED)
CASES = [*itertools.product(LAYOUTS, OBJECTIVES), ACROSS_REPLICAS]
SOUND = ("", "0")

SPREAD = {("cp2", objective): ("states",) for objective in OBJECTIVES if objective not in ALONE}
SPREAD |= {ACROSS_REPLICAS: ("weight", "states")}
"""Where terms are made of other ranks' states: what fails here on one of them fails in SimReg alone on the others."""
SPREAD_PLACES = [(*case, place) for case, places in SPREAD.items() for place in places]


def places_of(layout: str) -> list[str]:
    """The mask of a first stage goes nowhere."""
    return [place for place in PLACES if (layout, place) != ("pp2-first", "mask")]


def is_thorough(case: tuple[str, str]) -> bool:
    """Return whether all plants run in every layout; most objectives have them on one process alone."""
    layout, objective = case
    return layout == "one" or objective in (*AT_EVERY_PLACE, GATHERED)


def ends(case: tuple[str, str], number: str) -> list[str]:
    return places_of(case[0]) if is_thorough(case) else ["states"] * (number == "nan")


LEFT_OUT = [(*case, guard) for case in CASES for guard in ("adagc", "fp16")]


@pytest.mark.parametrize("given", quick(LEFT_OUT, lambda given: given == ("tp2-sp", "simreg", "fp16")), ids="-".join)
def test_the_step_is_left_out_on_every_rank(given: tuple[str, str, str], bench: Bench, tmp_path: Path) -> None:
    layout, objective, guard = given
    case = (layout, objective)
    places = [place for place in places_of(layout) if place not in SPREAD.get(case, ())]
    plants = list(itertools.product(places, NUMBERS))
    done, ranks = planted(tmp_path / "run", bench, layout, objective, guard, [SOUND, *plants, SOUND])
    assert done.status == 0, done.output[-3000:]
    assert len(ranks) == LAYOUTS[layout][2]
    for report in ranks:
        first, *struck, last = report
        assert [step["skipped"] for step in (first, last)] == [0, 0] and first["changed"] and last["changed"]
        for step in struck:
            assert (step["changed"], step["stepped"], step["skipped"]) == ([], False, 1), step


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("guard", ["adagc", "fp16"])
@pytest.mark.parametrize("given", SPREAD_PLACES, ids="-".join)
def test_states_that_fail_elsewhere_end_the_run(given, guard: str, number: str, bench: Bench, tmp_path: Path) -> None:
    *case, place = given
    assert OURS in ended(tmp_path / "run", bench, tuple(case), guard, (place, number))


ENDED = [(*case, number) for case in CASES for number in NUMBERS if ends(case, number)]


@pytest.mark.parametrize("given", quick(ENDED, lambda given: given == ("one", "simreg", "nan")), ids="-".join)
def test_the_run_ends_with_a_sentence(given: tuple[str, str, str], bench: Bench, tmp_path: Path) -> None:
    layout, objective, number = given
    case = (layout, objective)
    for place in ends(case, number):
        output = ended(tmp_path / place, bench, case, "check", (place, number))
        said = SENTENCES if case not in SPREAD else (*SENTENCES, OURS)  # whichever rank is first
        assert any(re.search(sentence, output) for sentence in said), output[-3000:]


WITH_TERMS = [case for case in CASES if case[0] != "pp2-first"]  # the last stage has them
WITHOUT_ADAGC = (("one", "simreg", "check"), ("one", "simreg", "none"))
TERMS = [(*case, guard) for case in WITH_TERMS for guard in GUARDS if guard == "check" or is_thorough(case)]


@pytest.mark.parametrize("given", quick(TERMS, lambda given: given in WITHOUT_ADAGC), ids="-".join)
def test_a_term_alone_ends_it_with_ours(given: tuple[str, str, str], bench: Bench, tmp_path: Path) -> None:
    layout, objective, guard = given
    assert OURS in ended(tmp_path / "run", bench, (layout, objective), guard, ("term", "nan"))


def ended(out: Path, bench: Bench, case: tuple[str, str], guard: str, plant: tuple[str, str]) -> str:
    """Return what the run printed; it ended in the struck step, and no rank took that."""
    done, ranks = planted(out, bench, *case, guard, [SOUND, plant, SOUND])
    assert done.status != 0, f"{plant}: it went on"
    assert len(ranks) == LAYOUTS[case[0]][2]
    for first, *later in ranks:
        assert first["stepped"] and first["changed"] and len(later) <= 1
        assert not any(step["stepped"] or step["changed"] for step in later), (plant, later)
    return done.output


def test_without_a_guard_the_step_is_taken(bench: Bench, tmp_path: Path) -> None:
    """The planted number arrives."""
    plan = [SOUND, ("states", "nan")]
    done, ((_, struck),) = planted(tmp_path / "run", bench, "one", "simreg", "none", plan)
    assert done.status == 0 and struck["stepped"] and len(struck["changed"]) > 10, done.output[-3000:]
