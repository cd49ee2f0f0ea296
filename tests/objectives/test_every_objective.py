# SPDX-License-Identifier: Apache-2.0
"""Every objective, built in or brought by a package: its definition, its derivative, what changes it and what does not,
and ranks that share a sequence.

Shapes: B sequences, S tokens, D features.
"""

import functools
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from simreg_megatron import SimRegConfig
from simreg_megatron.objectives import Kind, Objective
from simreg_megatron.parallel.layout import ShardLayout
from simreg_megatron.parallel.sequence import chunk_views, objective_terms, simreg_over_ranks
from simreg_megatron.parallel.shard import SequenceShard
from tests.distributed.test_samples import check_rank
from tests.distributed.test_shard import CP2_SP2, CP2_TP2
from tests.helpers.processes import run_processes
from tests.objectives.plain import ORACLES

SIZE, LENGTH, WIDTH = 6, 14, 8  # two chunks of six, and one of two
CHANGES = ("scale", "rotation", "names", "order")


class Given(NamedTuple):
    rows: Tensor  # [B, S, D]
    labels: Tensor  # [B, S]
    valid: Tensor  # bool [B, S]


def given() -> Given:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(3, LENGTH, WIDTH, generator=generator, dtype=torch.float64) + 0.3
    labels = torch.randint(0, 3, (3, LENGTH), generator=generator)
    return Given(rows, labels, torch.rand(3, LENGTH, generator=generator) < 0.85)


def settings(objective: Objective, **others: object) -> SimRegConfig:
    """The example settings; a temperature at which no pair is negligible."""
    example = objective.example
    found = {"objective": objective.name, "lambda_": example.weight, "objective_options": _narrow(objective)}
    if example.chunk_size is not None:
        found["chunk_size"] = SIZE
    if objective.temperature is not None:
        found["temperature"] = 0.4
    return SimRegConfig(**found | others)


def _narrow(objective: Objective) -> str:
    """Prefixes that these few features have."""
    if objective.options.get("prefixes") != "auto":
        return objective.example.options
    kept = [word for word in objective.example.options.split(",") if word and not word.startswith("prefixes=")]
    return ",".join([*kept, "prefixes=2/4"])


def terms(config: SimRegConfig, rows: Tensor, labels: Tensor, valid: Tensor) -> Tensor:
    shard = SequenceShard(ShardLayout(labels.shape[1]))
    views = chunk_views(config, shard, rows.transpose(0, 1), labels, valid, iteration=1)
    if config.is_simreg:
        return simreg_over_ranks(config, shard, rows.transpose(0, 1), views)
    return objective_terms(config, views, shard, {}, 1, lambda: dist.group.WORLD)


@pytest.fixture
def config(objective: Objective) -> SimRegConfig:
    found = settings(objective)
    if found.through_head:
        pytest.skip("its terms are the output layer's: tests/unit/test_prefixes_ce.py")
    return found


def test_it_is_its_definition(objective: Objective, config: SimRegConfig) -> None:
    oracle = objective.oracle or ORACLES.get(objective.name)
    if oracle is None:
        assert objective.relabels or not objective.trains or objective.kind is not Kind.PAIRS, "give it an oracle"
        pytest.skip("it is SimReg, or has a test of its own with its definition written out")
    rows, labels, valid = given()
    rows.requires_grad_()
    found, expected = terms(config, rows, labels, valid), []
    for b in range(len(rows)):
        for first in range(0, LENGTH, SIZE):
            chunk = torch.arange(first, min(first + SIZE, LENGTH))
            kept = chunk[valid[b, chunk]]
            if len(kept):
                expected.append(oracle(rows[b, kept], labels[b, kept], config.tau))
                torch.testing.assert_close(found[b, chunk].sum(), expected[-1], msg=f"sequence {b}, from {first}")
    total = sum(expected)
    (gradient,) = torch.autograd.grad(total, rows, retain_graph=True)
    (ours,) = torch.autograd.grad(found.sum(), rows)
    if objective.name != "sce":  # its targets are functions of the states, and have no gradient
        torch.testing.assert_close(ours, gradient)
    assert total > 0.1 and gradient.norm() > 0.1


def test_its_gradient_is_the_derivative(objective: Objective, config: SimRegConfig) -> None:
    rows, labels, valid = given()
    weights = torch.rand(3, LENGTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def loss(rows: Tensor) -> Tensor:
        return (terms(config, rows, labels, valid) * weights).sum()

    if objective.name == "sce":
        pytest.skip("its targets are functions of the states, and have no gradient")
    assert torch.autograd.gradcheck(loss, rows.requires_grad_(), atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_it_and_what_does_not(objective: Objective, config: SimRegConfig, change: str) -> None:
    rows, labels, valid = given()
    generator = torch.Generator().manual_seed(9)
    before = terms(config, rows, labels, valid)
    places = torch.arange(LENGTH)
    if change == "scale":
        rows = rows * (0.5 + torch.rand(3, LENGTH, 1, generator=generator, dtype=torch.float64))
    if change == "rotation":
        turn, _ = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64))
        rows = rows @ turn
    if change == "names":
        labels = torch.tensor([900, 7, 31])[labels]
    if change == "order":
        places = torch.cat([part[torch.randperm(len(part), generator=generator)] for part in places.split(SIZE)])
        rows, labels, valid = (part[:, places] for part in (rows, labels, valid))
    after = terms(config, rows, labels, valid)
    off = (after - before[:, places]).abs().max()
    if change in objective.invariant:
        assert off < 1e-9, off
    else:
        assert off > 1e-6, f"its record does not claim to be invariant to {change}, and it is"


def test_masked_tokens_are_not_seen(objective: Objective, config: SimRegConfig) -> None:
    rows, labels, valid = given()
    before = terms(config, rows, labels, valid)
    other = rows.masked_fill(~valid.unsqueeze(-1), torch.nan)
    after = terms(config, other, torch.where(valid, labels, 2), valid)
    torch.testing.assert_close(after, before)
    assert not before[~valid].any(), "nor have they a term"


def test_sequences_meet_only_where_it_compares_them(objective: Objective, config: SimRegConfig) -> None:
    rows, labels, valid = given()
    before = terms(config, rows, labels, valid)
    rows = torch.cat([rows[:2], -rows[2:].flip(1)])
    changed = (terms(config, rows, labels, valid)[:2] - before[:2]).abs().max() > 1e-9
    assert changed == (config.by_sequence or objective.name == "mic")


def test_a_state_that_is_not_finite_shows(objective: Objective, config: SimRegConfig) -> None:
    rows, labels, valid = given()
    valid[0, 1] = True
    rows[0, 1, 0] = torch.nan
    assert not terms(config, rows, labels, valid).isfinite().all()


def test_the_host_never_waits(objective: Objective, config: SimRegConfig) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):  # directions of another test may have been kept
        rows = torch.empty(2, 12, WIDTH, requires_grad=True)
        labels, valid = torch.zeros(2, 12, dtype=torch.long), torch.ones(2, 12, dtype=torch.bool)
        found = terms(config, rows, labels, valid)
        assert found.shape == (2, 12) and found.dtype == torch.float32
        if objective.trains:
            found.sum().backward()
            assert rows.grad is not None and rows.grad.shape == rows.shape


@pytest.mark.distributed
@pytest.mark.parametrize("layout", [CP2_SP2, pytest.param(CP2_TP2, marks=pytest.mark.slow)], ids=["cp2-sp2", "cp2-tp2"])
def test_ranks_that_share_a_sequence(objective: Objective, config, layout: ShardLayout, tmp_path: Path) -> None:
    """Chunks of 12 lie across them."""
    chunks = {} if objective.example.chunk_size is None else {"chunk_size": 12}
    check = functools.partial(check_rank, pulls_others=objective.name != "sce")  # whose keys have no gradient
    run_processes(check, 4, tmp_path, layout, settings(objective, **chunks))


def test_its_settings_are_read_back(objective: Objective) -> None:
    """A checkpoint keeps them as text."""
    found = settings(objective)
    text = ",".join(f"{name}={value}" for name, value in found.objective_options)
    assert SimRegConfig(objective=found.objective, objective_options=text).objective_options == found.objective_options
    assert found.record is objective and found.trains == objective.trains and found.active
