# SPDX-License-Identifier: Apache-2.0
"""What `auto` stands for: the first form that is right is taken, one that is wrong or broken is not."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from simreg_megatron import SimRegConfig, cli, comparison, doctor, trial
from simreg_megatron.comparison import Comparison, Shape
from simreg_megatron.kernels import form, halves, walk
from simreg_megatron.kernels.tiled import TorchTiles
from simreg_megatron.losses import simreg
from simreg_megatron.plugin import loop
from simreg_megatron.plugin.tokens import device_of, rows_dtype
from simreg_megatron.sharded.sequence import fast_form
from simreg_megatron.trial import Trial
from tests.helpers.processes import run_processes

CPU = torch.device("cpu")
SHAPE = Shape(batch=2, length=96, width=16, chunk_size=40, dtype=torch.float32)
Plant = Callable[[str, type[TorchTiles]], None]


class WrongLoss(TorchTiles):
    def sums(self, *given: Any) -> tuple[Tensor, Tensor]:
        rows, columns = super().sums(*given)
        return rows * torch.tensor([1.0, 1.001]).view(2, 1, 1), columns


class WrongGradient(TorchTiles):
    def project(self, of_unit: Tensor, span: walk.Span, grad: Tensor | None) -> None:
        of_unit[:, ::5] *= 1.1
        super().project(of_unit, span, grad)


class NotANumber(TorchTiles):
    def project(self, of_unit: Tensor, span: walk.Span, grad: Tensor | None) -> None:
        super().project(of_unit.fill_(math.nan), span, grad)


class WithoutATile(TorchTiles):
    """Nothing is lost of the closest pairs."""

    def sums(self, *given: Any) -> tuple[Tensor, Tensor]:
        self.names[:, 3] = -1.0
        return super().sums(*given)


class Broken(TorchTiles):
    def hold(self, one: walk.Span) -> None:
        raise RuntimeError("no such instruction\non this device")


class WrongFarAway(TorchTiles):
    """Right for what the reference is asked to compare."""

    def sums(self, *given: Any) -> tuple[Tensor, Tensor]:
        rows, columns = super().sums(*given)
        return (rows * 1.01 if self.rows.shape[2] > 64 else rows), columns


class WrongWhereShared(TorchTiles):
    """Right where a rank holds whole chunks: tiles that serve one side alone are those of other ranks' tokens."""

    def add_gradient(self, other: walk.Span, *rest: Any) -> None:
        if rest[-2] is not None or self.one == other:
            super().add_gradient(other, *rest)


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    monkeypatch.setattr(simreg, "AUTO", {})
    monkeypatch.setattr(trial, "AUTO", simreg.AUTO)

    def planted(name: str, tiles: type[TorchTiles]) -> None:
        planted_form = walk.WalkForm.__new__(walk.WalkForm)
        planted_form.tiles, planted_form.plain = tiles, walk.walks_over(tiles)
        monkeypatch.setitem(form.FORMS, name, planted_form)
        monkeypatch.setitem(form.MODULES, name, "planted")
        monkeypatch.setattr(simreg, "IMPLEMENTATIONS", (*simreg.IMPLEMENTATIONS, name))

    return planted


def test_the_first_right_form_is_taken(plant: Plant) -> None:
    plant("other", TorchTiles)
    (taken,) = trial.choose(SHAPE, CPU, impls=("other", "tiled"))
    assert 0 < taken.loss_error < comparison.LOSS_ERROR and taken.gradient_error < comparison.GRADIENT_ERROR
    assert {("cpu", torch.float32): "other"} == simreg.AUTO
    expected = "impl auto is other, which is right here on 2 x 96 x 16 (float32, chunks of 40)"
    assert trial.sentence([taken], SHAPE) == expected


@pytest.mark.parametrize(
    ("tiles", "why"),
    [
        (WrongLoss, r"is wrong \(loss off by 1\.0e-03"),
        (WrongGradient, r"is wrong \(loss off by .*e-0[678], gradient by \d\.\de-0[123]"),
        (WithoutATile, r"is wrong"),
        (
            WrongWhereShared,
            r"is wrong as two ranks( that keep)? compute it \(loss off by .*e-0[678], gradient by \d\.\de-0[123]",
        ),
        (NotANumber, r"gradient by nan"),
        (Broken, r"fails \(RuntimeError: no such instruction\)"),
    ],
)
def test_a_wrong_form_is_left_out(plant: Plant, tiles: type[TorchTiles], why: str) -> None:
    plant("bad", tiles)
    trials = trial.choose(SHAPE, CPU, impls=("bad", "tiled"))
    assert re.search(why, trials[0].failure), trials[0]
    assert trials[1].impl == "tiled" and {("cpu", torch.float32): "tiled"} == simreg.AUTO
    assert f"left out: bad {trials[0].failure}" in trial.sentence(trials, SHAPE)


@pytest.mark.parametrize("temperature", [0.001, 0.003, 0.01, 0.1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_right_form_is_right_of_any_type_and_temperature(dtype: torch.dtype, temperature: float) -> None:
    """Also where its gradient is too small for float16, and what the run's temperature makes of it for float32."""
    shape = Shape(batch=1, length=300, width=512, chunk_size=0, dtype=dtype, temperature=temperature)
    assert not trial.try_form("tiled", shape, CPU).failure


@pytest.mark.parametrize(("batch", "length", "width", "chunk_size"), [(1, 64, 1024, 0), (2, 256, 64, 64)])
def test_a_right_form_is_right_of_few_tokens(batch: int, length: int, width: int, chunk_size: int) -> None:
    """One pair is all of the loss, and float32 rounds its cosine by more than 1e-5 of the temperature."""
    shape = Shape(batch, length, width, chunk_size, torch.float32)
    assert not trial.try_form("tiled", shape, CPU).failure


def cut_off_sums(at_once: int, kept: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """As a tensor core adds up: so many products and the sum so far are cut off so many bits below float32's last place
    of the largest of them, added exactly, and cut off to float32."""

    def exponent(numbers: Tensor) -> Tensor:
        return torch.where(numbers == 0, -1000, torch.frexp(numbers).exponent - 1)

    def sums(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
        out.zero_()
        for one, other in zip(left.double().split(at_once, 2), right.double().split(at_once, 1), strict=True):
            addends = torch.cat([one.unsqueeze(-1) * other.unsqueeze(1), out.double().unsqueeze(2)], dim=2)
            of_products = exponent(one).unsqueeze(-1) + exponent(other).unsqueeze(1)
            largest = torch.cat([of_products, exponent(out.double()).unsqueeze(2)], dim=2).amax(2, keepdim=True)
            place = torch.ldexp(torch.ones((), dtype=torch.float64), largest - 23 - kept)
            exact = ((addends / place).trunc() * place).sum(dim=2)
            found = exact.float()
            out.copy_(torch.where(found.abs() > exact.abs(), torch.nextafter(found, torch.zeros(())), found))
        return out

    return sums


@pytest.mark.parametrize(("at_once", "kept"), [(8, 1), (16, 2)], ids=["A100", "H100"])
@pytest.mark.parametrize(("width", "dtype"), [(1024, torch.bfloat16), (1024, torch.float16), (4096, torch.bfloat16)])
def test_tensor_cores_are_right(
    width: int, dtype: torch.dtype, at_once: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halves, "multiplies_halves", lambda rows: rows.dtype.itemsize == 2)
    monkeypatch.setattr(halves, "widening_bmm", cut_off_sums(at_once, kept))
    compared = Comparison(Shape(batch=1, length=64, width=width, chunk_size=0, dtype=dtype))
    (loss, gradient), (loss_bound, gradient_bound) = compared.errors("tiled", CPU), compared.allowed()
    print(f"{width}, {dtype}: loss off by {loss:.2e}, gradient by {gradient:.2e}")
    assert comparison.LOSS_ERROR < loss < loss_bound / 2 and gradient < gradient_bound / 2
    assert loss > loss_bound / 12, "nor is the bound so wide that it says nothing"


def test_a_long_chunk_is_compared_over_its_whole_length(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "_COMPARED", 64)
    plant("far", WrongFarAway)
    long = SHAPE._replace(length=200, chunk_size=0)
    assert "is wrong" in trial.try_form("far", long, CPU).failure and not trial.try_form("tiled", long, CPU).failure
    assert not trial.try_form("far", long._replace(length=64), CPU).failure


def test_where_nothing_is_right_the_run_stops(plant: Plant) -> None:
    plant("bad", WrongLoss)
    with pytest.raises(RuntimeError, match=r"no fast form of SimReg is right .*bad is wrong.*--simreg-impl reference"):
        trial.choose(SHAPE, CPU, impls=("bad",))


def test_a_gpu_that_computes_nothing_any_more_ends_the_run(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    def dead(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    plant("bad", Broken)
    monkeypatch.setattr(trial, "_wait", dead)
    with pytest.raises(RuntimeError, match=r"tried impl bad on cpu.*illegal memory access.*--simreg-impl tiled"):
        trial.try_form("bad", SHAPE, CPU)


def agree_on_one(rank: int) -> None:
    wrong = {0: [], 1: ["triton"], 2: ["triton", "gemm", "tiled"]}[rank]
    trial.try_form = lambda impl, shape, device: Trial(impl, 0, 0, "is wrong" if impl in wrong else "")
    agreed = trial.choose(SHAPE, CPU, dist.group.WORLD, computes=rank < 2)
    assert {("cpu", torch.float32): "gemm"} == simreg.AUTO
    assert [one.failure for one in agreed] == ["is wrong" if rank == 1 else "fails on another rank", ""]


@pytest.mark.distributed
def test_all_ranks_take_the_same(tmp_path: Path) -> None:
    """One rank's own choice would have been triton."""
    run_processes(agree_on_one, 3, tmp_path)


def model(**config: Any) -> Any:
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    made = torch.nn.Linear(2, 2)
    made.config = SimpleNamespace(hidden_size=16, params_dtype=torch.bfloat16, **config)
    made.pg_collection = SimpleNamespace(tp=group, cp=group)
    return made


def rows_like(config: SimRegConfig, model: Any) -> torch.Tensor:
    return torch.empty(0, dtype=rows_dtype(config, model), device=device_of([model]))


def test_before_the_first_step(
    plant: Plant, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a GPU, and for `auto` alone; the shape is that of one rank."""
    plant("other", TorchTiles)
    shapes = []

    def tried(impl: str, shape: Shape, device: torch.device) -> Trial:
        shapes.append(shape)
        return Trial(impl, 0, 0, "" if impl == "other" else "is wrong")

    monkeypatch.setattr(trial, "try_form", tried)
    monkeypatch.setattr(trial.choose, "__kwdefaults__", {"computes": True, "impls": ("gemm", "other")})
    config = SimRegConfig(lambda_=1, chunk_size=64)
    loop.choose_form(config, [model()], 4, 512)
    assert not shapes and fast_form(config, rows_like(config, model())) == "tiled", "nothing to try on a CPU"
    monkeypatch.setattr(loop, "_is_worth_trying", lambda device: True)
    loop.choose_form(SimRegConfig(lambda_=1, impl="gemm"), [model()], 4, 512)
    loop.choose_form(SimRegConfig(lambda_=1, similarity="dot"), [model()], 4, 512)
    loop.choose_form(SimRegConfig(lambda_=1, objective="sce"), [model()], 4, 512)
    assert not shapes
    loop.choose_form(config, [model()], 4, 512)
    assert shapes == [Shape(4, 128, 16, 64, torch.bfloat16, 0.01)] * 2
    assert fast_form(config, rows_like(config, model())) == "other"
    assert fast_form(config, torch.empty(0)) == "tiled", "rows of another type were not tried"
    said = capsys.readouterr().out
    assert "> SimReg: impl auto is other, which is right here on 4 x 128 x 16 (bfloat16, chunks of 64)" in said
    assert "; left out: gemm is wrong" in said
    for inside, dtype in (({}, torch.bfloat16), ({"placement": "pre-norm"}, torch.float32)):
        loop.choose_form(replace(config, **inside), [model(fp32_residual_connection=True)], 4, 512)
        assert shapes[-1].dtype == dtype, "the final norm ends the wide residual stream"
    empty = torch.nn.Module()
    empty.config, empty.pg_collection = model().config, model().pg_collection
    loop.choose_form(config, [empty, model()], 4, 512)  # a stage without layers


def test_doctor_tries_them(plant: Plant, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["doctor", "--gpu"]) == 1 and "torch sees no GPU here" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(doctor, "_device_sentence", lambda: "Device: one")
    monkeypatch.setattr(doctor, "_train_one_step", lambda: print("a step") or True)
    plant("bad", WrongGradient)

    try_form = trial.try_form
    monkeypatch.setattr(trial, "try_form", lambda impl, *_: try_form("bad" if impl == "gemm" else "tiled", SHAPE, CPU))
    assert cli.main(["doctor", "--gpu"]) == 0
    said = capsys.readouterr().out
    assert "LLaMA 350M: 16 x 2048 x 1024 (bfloat16, chunks of 1024)" in said and "is wrong" in said
    assert said.endswith("a step\n")
    monkeypatch.setattr(trial, "try_form", lambda impl, *_: try_form("bad", SHAPE, CPU))
    assert cli.main(["doctor", "--gpu"]) == 1
