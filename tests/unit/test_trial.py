# SPDX-License-Identifier: Apache-2.0
"""The choice of `auto` on a GPU: triton if it is right, tiled if it is wrong or broken."""

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

from simreg_megatron import SimRegConfig, cli
from simreg_megatron.cli import doctor
from simreg_megatron.kernels.contrast import ForwardResult, Kernels, Saved
from simreg_megatron.kernels.torch import TorchKernels
from simreg_megatron.losses import simreg, trial
from simreg_megatron.losses.simreg import load_kernels
from simreg_megatron.losses.trial import Shape
from simreg_megatron.parallel.sequence import fast_impl
from simreg_megatron.plugin import loop
from simreg_megatron.plugin.tokens import device_of, rows_dtype
from tests.helpers.processes import run_processes


class WrongFarAway(TorchKernels):
    """Right in short chunks."""

    def finish(self, saved: Saved, *given: Any) -> ForwardResult:
        found = super().finish(saved, *given)
        return found._replace(terms=found.terms * 1.01) if saved.label_ids.shape[2] > 64 else found


CPU = torch.device("cpu")
SHAPE = Shape(batch=2, length=96, width=16, chunk_size=40, dtype=torch.float32)
Plant = Callable[[Kernels], None]


class WrongTerms(TorchKernels):
    def finish(self, *given: Any) -> ForwardResult:
        found = super().finish(*given)
        return found._replace(terms=found.terms * 1.001)


class WrongGradient(TorchKernels):
    def backward(self, *given: Any) -> None:
        super().backward(*given)
        given[-1][:, :, ::5] *= 1.1


class Broken(TorchKernels):
    def finish(self, *given: Any) -> ForwardResult:
        raise RuntimeError("no such instruction\non this device")


class WrongForSomeAnchors(TorchKernels):
    """Right where all tokens are anchors."""

    def backward(self, rows: Tensor, *given: Any) -> None:
        super().backward(rows, *given)
        if given[-1].shape[2] < rows.shape[2]:
            given[-1][:, :, ::5] *= 1.1


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Take another form for triton."""
    monkeypatch.setattr(simreg, "AUTO", {})
    monkeypatch.setattr(trial, "AUTO", simreg.AUTO)

    def take(planted: Kernels) -> None:
        monkeypatch.setattr(trial, "load_kernels", lambda impl: planted if impl == "triton" else load_kernels(impl))

    return take


def test_a_right_form_is_taken(plant: Plant) -> None:
    plant(TorchKernels())
    expected = "impl auto is triton on 2 x 96 x 16 (float32, chunks of 40), which is right here"
    assert trial.choose(SHAPE, CPU) == expected
    assert {("cpu", torch.float32): "triton"} == simreg.AUTO
    assert [simreg.chosen_impl("auto", rows=torch.empty(1, 4, width)) for width in (16, 6)] == ["triton", "tiled"]


WRONG_FORMS = [
    (WrongTerms, r"is wrong \(terms off by 1\.0e-03"),
    (WrongGradient, r"is wrong \(terms off by 0\.0e\+00, gradient by \d\.\de-0[1234]"),
    (WrongForSomeAnchors, r"is wrong on chunks that ranks share \(terms off by .*e-\d\d, gradient by \d\.\de-0[123]"),
    (Broken, r"fails \(RuntimeError: no such instruction\)"),
]


@pytest.mark.parametrize(("planted", "why"), WRONG_FORMS)
def test_a_wrong_form_is_left_out(plant: Plant, planted: type[Kernels], why: str) -> None:
    plant(planted())
    found = trial.choose(SHAPE, CPU)
    assert re.search(f"impl auto is tiled on .*, since triton {why}", found), found
    assert {("cpu", torch.float32): "tiled"} == simreg.AUTO


MANY = Shape(batch=1, length=300, width=512, chunk_size=0, dtype=torch.float32)
TYPES, TEMPERATURES = (torch.bfloat16, torch.float32), (0.001, 0.003, 0.01, 0.1)
FEW = [Shape(1, 64, 1024, 0, torch.float32), Shape(2, 256, 64, 64, torch.float32)]
SHAPES = [*(MANY._replace(dtype=t, temperature=tau) for t in TYPES for tau in TEMPERATURES), *FEW]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_right_form_is_right_of_any_type_temperature_and_shape(shape: Shape) -> None:
    assert not trial.failure_of("tiled", shape, CPU)


def agree_on_one(rank: int) -> None:
    trial.failure_of = lambda *_: {0: "", 1: "is wrong", 2: "has nothing to compute, and was asked"}[rank]
    found = trial.choose(SHAPE, CPU, dist.group.WORLD, computes=rank < 2)
    assert {("cpu", torch.float32): "tiled"} == simreg.AUTO
    assert found.endswith("since triton is wrong" if rank == 1 else "since triton fails on another rank")


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


def test_before_the_first_step(plant: Plant, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a GPU, and for `auto` alone; the shape is that of one rank."""
    plant(TorchKernels())
    shapes = []
    monkeypatch.setattr(trial, "failure_of", lambda impl, shape, device: shapes.append(shape) or "")
    config = SimRegConfig(lambda_=1, chunk_size=64)
    loop.choose_impl(config, [model()], 4, 512)
    assert not shapes and fast_impl(config, rows_like(config, model())) == "tiled", "nothing to try on a CPU"
    monkeypatch.setattr(loop, "device_of", lambda models: SimpleNamespace(type="cuda"))
    monkeypatch.setattr(trial.torch, "tensor", lambda value, device: torch.empty(()).fill_(value))
    loop.choose_impl(SimRegConfig(lambda_=1, impl="triton"), [model()], 4, 512)
    loop.choose_impl(SimRegConfig(lambda_=1, similarity="dot"), [model()], 4, 512)
    loop.choose_impl(SimRegConfig(lambda_=1, objective="sce"), [model()], 4, 512)
    assert not shapes
    loop.choose_impl(config, [model()], 4, 512)
    assert shapes == [Shape(4, 128, 16, 64, torch.bfloat16, 0.01)]
    assert {("cuda", torch.bfloat16): "triton"} == simreg.AUTO
    said = capsys.readouterr().out
    assert "> SimReg: impl auto is triton on 4 x 128 x 16 (bfloat16, chunks of 64), which is right here" in said
    loop.choose_impl(replace(config, chunk_size=300), [model()], 4, 512)
    assert shapes[-1].length == 300, "a chunk that ranks share is tried whole"
    for inside, dtype in (({}, torch.bfloat16), ({"placement": "pre-norm"}, torch.float32)):
        loop.choose_impl(replace(config, **inside), [model(fp32_residual_connection=True)], 4, 512)
        assert shapes[-1].dtype == dtype, "the final norm ends the wide residual stream"
    empty = torch.nn.Module()
    empty.config, empty.pg_collection = model().config, model().pg_collection
    loop.choose_impl(config, [empty, model()], 4, 512)  # a stage without layers


def test_doctor_tries_it(plant: Plant, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["doctor", "--gpu"]) == 1 and "torch sees no GPU here" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(doctor, "_device_sentence", lambda _: "Device: one")
    monkeypatch.setattr(doctor, "_train_one_step", lambda: print("a step") or True)
    failure_of = trial.failure_of
    monkeypatch.setattr(trial, "failure_of", lambda impl, *_: failure_of(impl, SHAPE, CPU))
    for planted, verdict in ((TorchKernels(), "is right\n"), (WrongGradient(), "is wrong (terms off by ")):
        plant(planted)
        assert cli.main(["doctor", "--gpu"]) == 0
        said = capsys.readouterr().out
        assert f"LLaMA 350M, 16 x 2048 x 1024 (bfloat16, chunks of 1024): triton {verdict}" in said
        assert said.endswith("a step\n") and ("impl auto takes tiled" in said) == ("wrong" in verdict)


def test_a_long_chunk_is_compared_over_its_whole_length(plant: Plant) -> None:
    plant(WrongFarAway())
    long = SHAPE._replace(length=200, chunk_size=0)
    assert "is wrong" in trial.failure_of("triton", long, CPU)
    assert not trial.failure_of("triton", long._replace(length=64), CPU)
