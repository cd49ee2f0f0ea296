# SPDX-License-Identifier: Apache-2.0
"""With lambda 0 a run is plain Megatron, bit for bit; with SimReg on, its evaluation still is."""

import re
from pathlib import Path

import pytest

from tests.helpers.quick import quick
from tests.megatron import runs
from tests.megatron.runs import SIMREG


@pytest.mark.parametrize("processes", quick([1, 2], lambda processes: processes == 1), ids=["tp1", "tp2"])
def test_lambda_zero_is_plain_megatron(processes: int, data_flags: tuple[str, ...], tmp_path: Path) -> None:
    flags = (*data_flags, "--train-iters", "20", "--tensor-model-parallel-size", str(processes))
    plain = runs.train(tmp_path / "plain", flags, processes=processes, plain=True)
    off = runs.train(tmp_path / "off", (*flags, "--simreg-lambda", "0"), processes=processes)
    assert (plain.losses, plain.norms) == (off.losses, off.norms) and len(plain.losses) == 20
    assert plain.losses[-1] < plain.losses[0], "the runs must train"
    assert runs.same_bits(plain, off)
    assert "simreg loss" not in (tmp_path / "off" / "log").read_text()


def test_before_its_start_a_run_is_plain_megatron(data_flags: tuple[str, ...], tmp_path: Path) -> None:
    flags = (*data_flags, "--train-iters", "5")
    plain = runs.train(tmp_path / "plain", flags, plain=True)
    late = (*SIMREG, "--simreg-start-iter", "3", "--simreg-warmup-iters", "2")
    begun = runs.train(tmp_path / "late", (*flags, *late))
    assert begun.norms[:3] == plain.norms[:3] and begun.losses[:4] == plain.losses[:4]
    assert begun.norms[3] > 1.5 * plain.norms[3] and begun.losses[4] != plain.losses[4]
    assert "from iteration 3 on, rising over 2 iterations" in (tmp_path / "late" / "log").read_text()


def test_evaluation_is_untouched(data_flags: tuple[str, ...], tmp_path: Path) -> None:
    """A learning rate of 0 keeps the weights of both runs equal, while SimReg computes gradients in every step."""
    frozen = ("--lr", "0", "--min-lr", "0", "--train-iters", "4", "--eval-interval", "2", "--eval-iters", "2")
    on = (*SIMREG, "--simreg-chunk-size", "16")
    plain = runs.train(tmp_path / "plain", (*data_flags, *frozen), plain=True, patch="watch:evaluation")
    regularized = runs.train(tmp_path / "on", (*data_flags, *frozen, *on), patch="watch:evaluation")
    assert regularized.norms[0] > 2 * plain.norms[0] and runs.same_bits(plain, regularized)
    wanted, seen = (evaluations(tmp_path / name / "log") for name in ("plain", "on"))
    assert len(wanted) >= 2 and [loss for loss, _ in seen] == [loss for loss, _ in wanted]
    assert all(calls == "0" for _, calls in seen), "SimReg must not be called while evaluating"
    assert "SimReg calls in training: 8" in (tmp_path / "on" / "log").read_text(), "four steps of two micro-batches"


def test_measuring_costs_nothing_between_log_steps(data_flags: tuple[str, ...], tmp_path: Path) -> None:
    """And what it logs is what a run that trains on it, with the same weights, logs of the same step."""
    frozen = (*data_flags, "--lr", "0", "--min-lr", "0", "--train-iters", "5", "--simreg-temperature", "0.5")
    watched = {"patch": "watch:evaluation"}
    runs.train(tmp_path / "each", (*frozen, "--simreg-lambda", "10"), **watched)
    sparse = (*frozen, "--simreg-objective", "none", "--log-interval", "2")
    measured = runs.train(tmp_path / "some", sparse, **watched)
    assert runs.same_bits(measured, runs.train(tmp_path / "plain", frozen[:-2], plain=True)), "the weights never moved"
    each, some = (values_of(tmp_path / name / "log") for name in ("each", "some"))
    assert list(some) == [1, 2, 4], "Megatron prints a line after the first step, too"
    assert (each[1], each[4]) == (some[1], some[4]) and len({tuple(values) for values in some.values()}) == 3
    assert each[2] == some[2], "a line is of its own steps alone, also the one after the first"
    log = (tmp_path / "some" / "log").read_text()
    assert "SimReg calls in training: 6" in log, "three logged steps of two micro-batches"
    assert "> SimReg: measured only, in log steps, not trained on" in log


def values_of(log: Path) -> dict[int, list[tuple[str, str]]]:
    lines = re.finditer(r"iteration +(\d+)/.*", log.read_text())
    return {int(line[1]): re.findall(r"(simreg [a-z ]+): (\S+)", line[0]) for line in lines}


def evaluations(log: Path) -> list[tuple[str, str]]:
    return re.findall(r"^evaluated: (\S+), SimReg calls: (\d+)", log.read_text(), re.M)
