# SPDX-License-Identifier: Apache-2.0
"""Settings under which SimReg would be wrong or silent are refused by name; open log writers get its values."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from simreg_megatron import SimRegConfig
from simreg_megatron.plugin import hooks
from simreg_megatron.plugin.reporting import write_scalars

LABELS = torch.zeros(2, 8, dtype=torch.long)


@pytest.mark.parametrize(
    ("given", "loss", "sentence"),
    [
        ({"packed_seq_params": object()}, torch.zeros(2, 8), "borders inside packed sequences"),
        ({"output_processor": print}, torch.zeros(2, 8), "an output processor returns something else"),
        ({}, torch.zeros(2, 8, 5), "an output processor returns something else"),
    ],
)
def test_another_loss_than_megatrons_is_refused(given: dict, loss: torch.Tensor, sentence: str) -> None:
    with pytest.raises(NotImplementedError, match=sentence) as caught:
        hooks._refuse_unknown_loss({"labels": LABELS, **given}, loss)
    assert "--simreg-lambda 0" in str(caught.value), "the way out"
    hooks._refuse_unknown_loss({"labels": LABELS}, torch.zeros(2, 8))


@pytest.mark.parametrize(
    "graphs",
    [
        {"cuda_graph_impl": "full_iteration"},
        {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"},
        {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]},
    ],
)
def test_full_iteration_graphs_are_refused(graphs: dict) -> None:
    with pytest.raises(NotImplementedError, match="full-iteration CUDA graphs"):
        hooks._refuse_arguments(SimpleNamespace(log_interval=1, **graphs), SimRegConfig(lambda_=1))
    layers = SimpleNamespace(log_interval=1, cuda_graph_impl="local", cuda_graph_scope="attn")
    hooks._refuse_arguments(layers, SimRegConfig(lambda_=1))


def test_log_interval_must_fit_megatrons() -> None:
    args = SimpleNamespace(log_interval=10)
    with pytest.raises(ValueError, match="15 must be a multiple of --log-interval 10"):
        hooks._refuse_arguments(args, SimRegConfig(lambda_=1, log_interval=15))
    hooks._refuse_arguments(args, SimRegConfig(lambda_=1, log_interval=20))


class Writer:
    def __init__(self) -> None:
        self.written: list[tuple] = []

    def add_scalar(self, name: str, value: torch.Tensor, iteration: int) -> None:
        self.written.append((name, value.item(), iteration))

    def log(self, values: dict, iteration: int) -> None:
        self.written += [(name, value.item(), iteration) for name, value in values.items()]


@pytest.mark.parametrize("there", [("tensorboard",), ("wandb",), ("tensorboard", "wandb"), ()])
def test_values_reach_the_writers_that_are_open(there: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    writers = {name: Writer() if name in there else None for name in ("tensorboard", "wandb")}
    module = ModuleType("megatron.training.global_vars")
    module.get_tensorboard_writer = lambda: writers["tensorboard"]
    module.get_wandb_writer = lambda: writers["wandb"]
    monkeypatch.setitem(sys.modules, "megatron.training", ModuleType("megatron.training"))
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    write_scalars({"simreg loss": torch.tensor(0.5)}, 7)
    for name in there:
        assert writers[name].written == [("simreg loss", 0.5, 7)]
