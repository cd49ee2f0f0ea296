# SPDX-License-Identifier: Apache-2.0
"""The ground the parity table stands on: forked ranks, and ranks put together."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.megatron import runs
from tests.megatron.runs import PRETRAIN, SIMREG, Recorded, ReplicasDifferError

CHUNK = ("--simreg-chunk-size", "24")


def test_forked_ranks_compute_what_torchrun_does(data_flags: tuple[str, ...], tmp_path: Path) -> None:
    flags = (*data_flags, *SIMREG, *CHUNK, "--tensor-model-parallel-size", "2", "--train-iters", "2")
    command = ["-m", "tests.megatron.record", str(tmp_path / "torchrun"), str(PRETRAIN), *runs.all_flags(flags)]
    first, second = runs.two_nodes(command)
    assert first.status == 0 == second.status, first.output[-2000:] + second.output[-2000:]
    forked, started = runs.train(tmp_path / "forked", flags, processes=2), runs.read(tmp_path / "torchrun")
    assert forked.losses == started.losses and forked.norms == started.norms and len(forked.norms) == 2
    assert runs.same_bits(forked, started)
    assert all(torch.equal(grad, started.grads[name]) for name, grad in forked.grads.items())


def write_ranks(folder: Path, parts: list[torch.Tensor], name: str, shards: list[tuple[int, int, int]]) -> Path:
    for number, (part, shard) in enumerate(zip(parts, shards, strict=True)):
        rank = {"losses": [1.0], "norms": [2.0], "logged": [], "params": {}, "shards": {name: shard}}
        rank["grads"] = {name: part}
        torch.save(rank, folder / f"rank{number}.pt")
    return folder


@pytest.mark.parametrize("shard", [(-1, 0, 1), (0, 1, 2)], ids=["whole", "same-shard"])
def test_replicas_must_have_the_same_bits(shard: tuple[int, int, int], tmp_path: Path) -> None:
    nearly = [torch.ones(2), torch.ones(2).nextafter(torch.tensor(2.0))]
    with pytest.raises(ReplicasDifferError, match=r"grads of norm\.weight differ"):
        runs.read(write_ranks(tmp_path, nearly, "norm.weight", [shard, shard]))


def test_a_difference_is_of_any_value_in_any_line() -> None:
    nan, d, m = float("nan"), "simreg norm difference", "simreg margin 10%"
    one = Recorded(
        [1.0],
        [1.0],
        {"a": torch.ones(1)},
        {},
        [{"loss": 2.0, d: 0.01, m: 0.01}, {"loss": 2.0, d: 0.01, m: 0.01, "no": nan}],
    )
    same = replace(one, logged=[dict(line) for line in one.logged])
    assert (runs.difference(one, same).logged, runs.difference(one, same).grad) == (0, 0), "nor has it a number"
    for change, (gap, value) in (
        ({"loss": 2.5}, (0.25, "loss")),
        ({d: 0.26}, (0.25, d)),  # in standard deviations, however small it is itself
        ({m: 0.26}, (0.25, m)),  # in nats
        ({"no": 1.0}, (math.inf, "no")),
        ({"loss": nan}, (math.inf, "loss")),
    ):
        other = runs.difference(one, replace(one, logged=[one.logged[0], one.logged[1] | change]))
        assert (other.logged, other.value) == (pytest.approx(gap), value)
        assert other.loss == other.norm == other.grad == 0
    assert runs.difference(one, same, {"no"}).logged == 0 and runs.difference(one, same, {d}).logged == math.inf
