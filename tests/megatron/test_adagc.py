# SPDX-License-Identifier: Apache-2.0
"""AdaGC in Megatron's own loop: the same coefficients in every layout, kept in checkpoints, off unless asked for."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.quick import quick
from tests.megatron import runs
from tests.megatron.parity.run import Bench
from tests.megatron.watch import SPIKED

STEPS = 6
SIMREG = (*runs.SIMREG, "--simreg-chunk-size", "24")
# A limit below the average, so that every step after the warm-up clips many parameters.
ADAGC = ("--adagc", "--adagc-lambda-rel", "0.9", "--adagc-beta", "0.8", "--adagc-warmup-iters", "2")
CONSTANT = ("--lr-decay-style", "constant", "--eval-iters", "0")
TP2, EP2 = "--tensor-model-parallel-size 2", "--expert-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "tp2": ("dense", TP2, 2),
    "tp2-sp": ("dense", f"{TP2} --sequence-parallel", 2),
    "pp2-tied": ("tied", "--pipeline-model-parallel-size 2", 2),
    "pp2-vpp2": ("deep", "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", 2),
    "dp2": ("dense", "", 2),
    "dp2-distributed": ("dense", "--use-distributed-optimizer", 2),
    "tp2-dp2-distributed": ("dense", f"{TP2} --sequence-parallel --use-distributed-optimizer", 4),
    "dp2-two-instances": ("dense", "--use-distributed-optimizer --num-distributed-optimizer-instances 2", 2),
    "tied-tp2-pp2-distributed": ("tied", f"{TP2} --sequence-parallel {PP2} --use-distributed-optimizer", 4),
    "mtp-pp2": ("mtp", PP2, 2),
    "pp2-ep2-distributed": ("moe", f"{PP2} {EP2} --use-distributed-optimizer", 4),
    "cp2": ("dense", "--context-parallel-size 2", 2),
    "ep2": ("moe", EP2, 2),
    "ep2-distributed": ("moe", f"{EP2} --use-distributed-optimizer", 2),
    "ep2-tp2-etp1": ("moe", f"{EP2} {TP2} --sequence-parallel --expert-tensor-parallel-size 1", 4),
    "tp2-etp2": ("moe", f"{TP2} --sequence-parallel --expert-tensor-parallel-size 2", 2),
}


class Ran:
    """Results of a run, and AdaGC's work in each of its steps, by parameter name."""

    def __init__(self, out: Path) -> None:
        self.recorded = runs.read(out)
        ranks = [torch.load(path, weights_only=True) for path in sorted(out.glob("adagc*.pt"))]
        self.coefficients: list[dict[str, float]] = []
        for steps in zip(*ranks, strict=True):
            assert all(step["state"] == steps[0]["state"] for step in steps), "every rank has the same averages"
            self.coefficients.append({name: value for step in steps for name, value in step["coefficients"].items()})
        self.states: list[dict[str, Any]] = [step["state"] for step in ranks[0]]
        self.log = (out / "log").read_text()


def start(bench: Bench, model: str, steps: int = STEPS) -> tuple[str, ...]:
    load = ("--load", str(bench.checkpoint(model)), "--finetune", "--no-load-optim", "--no-load-rng")
    return (*bench.data_flags, *load, *CONSTANT, "--train-iters", str(steps))


def train(out: Path, flags: tuple[str, ...], *, model: str = "dense", processes: int = 1, patch: str = "adagc") -> Ran:
    runs.train(out, flags, model=model, processes=processes, patch=f"watch:{patch}")
    return Ran(out)


@pytest.fixture(scope="module")
def one_process(bench: Bench, tmp_path_factory: pytest.TempPathFactory):
    found: dict[str, Ran] = {}

    def of(model: str) -> Ran:
        if model not in found:
            out = tmp_path_factory.mktemp(model)
            found[model] = train(out, (*start(bench, model), *SIMREG, *ADAGC), model=model)
        return found[model]

    return of


def apart(one: list[dict[str, float]], other: list[dict[str, float]]) -> float:
    assert [step.keys() for step in one] == [step.keys() for step in other]
    return max(abs(a[name] - b[name]) / a[name] for a, b in zip(one, other, strict=True) for name in a)


# What a rank must add up, and experts.
QUICK = ("tp2-sp", "ep2")


@pytest.mark.parametrize("layout", quick(LAYOUTS, lambda layout: layout in QUICK))
def test_the_same_in_every_layout(layout: str, bench: Bench, one_process, tmp_path: Path) -> None:
    model, flags, processes = LAYOUTS[layout]
    expected = one_process(model)
    got = train(tmp_path, (*start(bench, model), *SIMREG, *ADAGC, *flags.split()), model=model, processes=processes)
    gammas = [[state["gammas"] for state in ran.states] for ran in (expected, got)]
    assert apart(*gammas) < 1e-5
    assert apart(expected.coefficients, got.coefficients) < 1e-5
    clipped = [sum(value < 0.999 for value in step.values()) for step in expected.coefficients]
    assert min(clipped[2:]) > 3 and len({round(value, 4) for value in expected.coefficients[3].values()}) > 3
    assert got.recorded.losses == pytest.approx(expected.recorded.losses, rel=1e-5)


MISTAKES = {"local_norms": "tp2-sp", "replicas_counted_twice": "tp2-sp", "instances_counted_twice": "dp2-two-instances"}


@pytest.mark.parametrize("mistake", quick(MISTAKES, lambda mistake: mistake == "local_norms"))
def test_known_mistakes_are_seen(mistake: str, bench: Bench, one_process, tmp_path: Path) -> None:
    flags = (*start(bench, "dense"), *SIMREG, *ADAGC, *LAYOUTS[MISTAKES[mistake]][1].split())
    try:
        runs.train(tmp_path, flags, processes=2, patch=f"breakage:adagc_{mistake}")
    except runs.ReplicasDifferError:
        return  # each rank clipped what it shares by another coefficient
    expected, got = one_process("dense"), Ran(tmp_path)
    gammas = [[state["gammas"] for state in ran.states] for ran in (expected, got)]
    # All norms wrong by one factor show in the warm-up's coefficients alone, one norm wrong in its average alone.
    assert max(apart(*gammas), apart(expected.coefficients, got.coefficients)) > 0.1


def test_what_would_count_twice_is_refused(bench: Bench, tmp_path: Path) -> None:
    flags = (*start(bench, "dense"), *ADAGC, *LAYOUTS["tp2-sp"][1].split())
    done = runs.attempt(tmp_path, flags, processes=2, patch="breakage:adagc_replicas_counted_twice_and_checked")
    assert done.status != 0 and "iteration        1/" not in done.output
    assert "--adagc would count 128 elements of decoder.final_layernorm.weight, which has 64" in done.output


def test_fp16_is_unscaled_first(bench: Bench, one_process, tmp_path: Path) -> None:
    flags = (*start(bench, "dense"), *SIMREG, *ADAGC, "--fp16", "--loss-scale", "256")
    got = train(tmp_path, flags)
    assert apart(*([state["gammas"] for state in ran.states[:3]] for ran in (one_process("dense"), got))) < 0.02


def test_a_spike_is_cut_and_the_others_are_left_alone(bench: Bench, tmp_path: Path) -> None:
    words = "--adagc --adagc-lambda-rel 1.5 --adagc-warmup-iters 2 --lr 1e-5"
    flags = (*start(bench, "dense"), *words.split())
    flags += ("--adagc-lambda-abs", "1e9")
    usual, spiked = (train(tmp_path / patch, flags, patch=patch) for patch in ("adagc", "adagc_spike"))
    before, cut = usual.coefficients[-1], spiked.coefficients[-1]
    limit = 1.5 * spiked.states[-2]["gammas"][SPIKED]
    growth = spiked.states[-1]["gammas"][SPIKED] / spiked.states[-2]["gammas"][SPIKED]
    assert cut[SPIKED] < 0.01 < before[SPIKED]
    assert growth == pytest.approx(0.99 + 0.01 * 1.5, rel=1e-5), f"its norm after the cut was {limit}"
    assert cut | {SPIKED: before[SPIKED]} == before


def test_it_works_without_simreg_and_says_so(bench: Bench, tmp_path: Path) -> None:
    ran = train(tmp_path, (*start(bench, "dense", 3), *ADAGC, "--clip-grad", "0.5"))
    assert "AdaGC (clipped): 15 parameters" in ran.log and "simreg loss" not in ran.log
    assert "below a global norm of 0.5, instead of --clip-grad" in ran.log
    shares = [float(value) for value in re.findall(r"adagc clipped share: (\S+)", ran.log)]
    norms = [float(value) for value in re.findall(r"adagc norm before clipping: (\S+)", ran.log)]
    assert len(shares) == 3 and 0 < shares[-1] <= 1
    assert norms == pytest.approx(ran.recorded.norms, rel=1e-4), "Megatron's own, of each step"


@pytest.mark.slow
def test_a_warm_up_is_megatrons_own_clipping(bench: Bench, tmp_path: Path) -> None:
    plain = runs.train(tmp_path / "plain", start(bench, "dense", 4))
    warm = train(tmp_path / "warm", (*start(bench, "dense", 4), "--adagc"))
    assert warm.recorded.losses == pytest.approx(plain.losses, rel=1e-6)
    unclipped = runs.train(tmp_path / "unclipped", (*start(bench, "dense", 4), "--clip-grad", "0"))
    assert warm.recorded.losses != pytest.approx(unclipped.losses, rel=1e-6)


@pytest.mark.slow
def test_the_averages_go_on_in_pipeline_stages(bench: Bench, tmp_path: Path) -> None:
    """For other layouts, and other settings before, see test_carried.py."""
    flags = (*bench.data_flags, *CONSTANT, *SIMREG, *ADAGC, "--train-iters", str(STEPS))
    whole = train(tmp_path / "whole", (*flags, *TP2.split()), processes=2)
    save = ("--save", str(tmp_path / "saved"), "--save-interval", "3", "--exit-interval", "3")
    train(tmp_path / "stopped", (*flags, *save, *TP2.split()), processes=2)
    load = ("--load", str(tmp_path / "saved"), *PP2.split())
    gone_on = train(tmp_path / "on", (*flags, *load), processes=2)
    assert apart([state["gammas"] for state in whole.states[3:]], [state["gammas"] for state in gone_on.states]) < 1e-4
    assert [state["steps"] for state in gone_on.states] == [4, 5, 6]


def test_nothing_is_clipped_where_nothing_is_trained(bench: Bench, tmp_path: Path) -> None:
    flags = (*start(bench, "dense", 1), *ADAGC, "--skip-train", "--eval-iters", "1")
    done = runs.attempt(tmp_path, flags)
    assert done.status == 0 and "validation loss" in done.output, done.output[-2000:]


def test_settings_that_cannot_work_are_refused(bench: Bench, tmp_path: Path) -> None:
    done = runs.attempt(tmp_path, (*start(bench, "dense", 1), "--adagc", "--use-torch-fsdp2"))
    assert done.status != 0 and "iteration        1/" not in done.output
    assert "does not know where --use-torch-fsdp2 keeps the gradients" in done.output, done.output[-2000:]


def test_a_gradient_that_is_not_finite_is_not_stepped_on(bench: Bench, tmp_path: Path) -> None:
    """One that Megatron leaves out of its main norm; for the others see test_planted.py."""
    flags = (*start(bench, "mtp", 4), *ADAGC, "--mtp-detach-heads", "--no-check-for-nan-in-loss-and-grad")
    runs.train(tmp_path, flags, model="mtp", patch="breakage:gradient_of_mtp_not_finite_in_third_step")
    ran = Ran(tmp_path)
    assert all(torch.isfinite(parameter).all() for parameter in ran.recorded.params.values())
    assert [state["steps"] for state in ran.states] == [1, 2, 3, 3], "the third step is left out, and not counted"
    assert len({round(value, 4) for value in ran.coefficients[0].values()}) == 2, "the heads have a norm of their own"
    assert ran.states[2]["gammas"] == ran.states[1]["gammas"] != ran.states[3]["gammas"]
