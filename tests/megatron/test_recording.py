# SPDX-License-Identifier: Apache-2.0
"""The ground the parity table stands on: forked ranks, and ranks put together."""

from __future__ import annotations

import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.megatron import forks, runs
from tests.megatron.runs import PRETRAIN, SIMREG, Difference, Recorded, ReplicasDifferError

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


def _end(statuses: list[int], seconds: float) -> None:
    print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}")
    status = statuses[int(os.environ["RANK"])]
    if status:
        sys.exit(status)
    time.sleep(seconds)


def test_a_rank_that_fails_ends_the_job(tmp_path: Path) -> None:
    started = time.monotonic()
    assert forks.run_ranks(_end, [0, 3], 120.0, processes=2, log=tmp_path / "log", timeout=120) == 3
    assert time.monotonic() - started < 100, "the other rank must not be waited for"
    assert "rank 1 of 2" in (tmp_path / "log").read_text()


def write_ranks(folder: Path, parts: list[torch.Tensor], name: str, shards: list[tuple[int, int, int]]) -> Path:
    for number, (part, shard) in enumerate(zip(parts, shards, strict=True)):
        rank = {"losses": [1.0], "norms": [2.0], "logged": [], "params": {}, "shards": {name: shard}}
        rank["grads"] = {name: part}
        torch.save(rank, folder / f"rank{number}.pt")
    return folder


def test_shards_are_joined_in_their_order(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(6, 4)
    halves, shards = [whole[3:], whole[:3]], [(0, 1, 2), (0, 0, 2)]
    assert torch.equal(runs.read(write_ranks(tmp_path, halves, "proj.weight", shards)).grads["proj.weight"], whole)


def test_the_halves_of_a_gated_layer_are_joined_each_by_itself(tmp_path: Path) -> None:
    gate, value = torch.arange(8.0).view(4, 2), torch.arange(8.0, 16.0).view(4, 2)
    parts = [torch.cat([gate[:2], value[:2]]), torch.cat([gate[2:], value[2:]])]
    name = "mlp.linear_fc1.weight"
    joined = runs.read(write_ranks(tmp_path, parts, name, [(0, 0, 2), (0, 1, 2)])).grads[name]
    assert torch.equal(joined, torch.cat([gate, value]))


@pytest.mark.parametrize("shard", [(-1, 0, 1), (0, 1, 2)], ids=["whole", "same-shard"])
def test_replicas_must_have_the_same_bits(shard: tuple[int, int, int], tmp_path: Path) -> None:
    nearly = [torch.ones(2), torch.ones(2).nextafter(torch.tensor(2.0))]
    with pytest.raises(ReplicasDifferError, match=r"grads of norm\.weight differ"):
        runs.read(write_ranks(tmp_path, nearly, "norm.weight", [shard, shard]))


def test_a_difference_is_the_largest_of_any_parameter_and_step() -> None:
    one = Recorded([1.0, 2.0], [4.0, 4.0], {"a": torch.ones(4), "b": torch.ones(1)}, {})
    other = Recorded([1.0, 2.2], [4.0, 5.0], {"a": torch.ones(4), "b": torch.full((1,), 1.5)}, {})
    gap = runs.difference(one, other)
    assert (gap.loss, gap.norm) == (pytest.approx(0.1), 0.25) and (gap.grad, gap.parameter) == (0.5, "b")
    assert runs.difference(one, one) == Difference(0, 0, 0, "b")
    lost = Recorded([1.0, float("nan")], [4.0, 4.0], {"a": torch.full((4,), float("nan")), "b": torch.ones(1)}, {})
    assert runs.difference(one, lost).loss == runs.difference(one, lost).grad == float("inf")


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


def test_ranks_must_log_the_same(tmp_path: Path) -> None:
    """All but those that see no final hidden states, and log nothing of them."""
    lines: list[dict[str, float]] = [{"simreg loss": 1.0}, {}, {"simreg loss": 1.0}]
    for number, line in enumerate(lines):
        rank = {"losses": [], "norms": [2.0], "logged": [line], "grads": {}, "params": {}, "shards": {}}
        torch.save({**rank, "losses": [1.0] if line else []}, tmp_path / f"rank{number}.pt")
    assert runs.read(tmp_path).logged == [{"simreg loss": 1.0}]
    torch.save({**rank, "losses": [1.0], "logged": [{"simreg loss": 1.0 + 2**-52}]}, tmp_path / "rank2.pt")
    with pytest.raises(ReplicasDifferError, match="simreg loss differ between ranks"):
        runs.read(tmp_path)
