# SPDX-License-Identifier: Apache-2.0
"""Every way in which Megatron names and cuts weights is read as the same weights; the cuts are made by hand here.

Transformer Engine's layouts are known by their names alone: no layer of it runs in these tests.
"""

from __future__ import annotations

import argparse
import enum
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from simreg_megatron.checkpoint.architecture import Architecture
from simreg_megatron.checkpoint.dist_writer import DistWriter, arguments
from simreg_megatron.checkpoint.errors import CheckpointError
from simreg_megatron.checkpoint.source import open_checkpoint
from tests.helpers.checkpoints import DENSE, EXPERTS, dist_checkpoint, random_weights

Rename = Callable[[str], str]


def rank_files(
    folder: Path, architecture: Architecture, parts: dict[str, dict[str, dict[str, Tensor]]], **sizes: int
) -> Path:
    """The `torch` format: {"mp_rank_00": {"model": state dict}}, with what else such a file holds."""
    args = argparse.Namespace(**{**arguments(architecture), **sizes})
    args.exit_signal = signal.SIGTERM
    for name, models in parts.items():
        (folder / name).mkdir(parents=True)
        beside = {"iteration": 3, "checkpoint_version": 3.0, "rng_state": [{"np_rng_state": np.random.get_state()}]}
        content = {"args": args, **models, **beside, "optimizer": {"state": torch.zeros(3)}}
        torch.save(content, folder / name / "model_optim_rng.pt")
    return folder


def check(load: Path, truth: dict[str, Tensor]) -> None:
    found = open_checkpoint(load).weights
    assert found.keys() == truth.keys(), found.keys() ^ truth.keys()
    for name, tensor in truth.items():
        read = found[name].read()
        assert found[name].shape == tuple(read.shape) and torch.equal(read, tensor), name


def test_both_norms_of_transformer_engine(tmp_path: Path) -> None:
    truth = random_weights(DENSE)
    names = {
        "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
        "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    }
    state = {}
    for name, tensor in truth.items():
        for local, fused in names.items():
            name = name.replace(local, fused)
        state[name] = tensor
    state["decoder.layers.0.self_attention.linear_qkv._extra_state"] = None
    check(rank_files(tmp_path / "te", DENSE, {"mp_rank_00": {"model": state}}), truth)


def by_tensor_rank(truth: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Rank `rank` of two: rows of what is split along its outputs, columns of what is split along its inputs."""
    state = {}
    for name, tensor in truth.items():
        if "norm" in name or "router" in name:
            state[name] = tensor
        elif "linear_proj" in name or "linear_fc2" in name:
            state[name] = tensor[:, rank * tensor.shape[1] // 2 : (rank + 1) * tensor.shape[1] // 2].clone()
        elif "linear_fc1" in name:
            half, quarter = tensor.shape[0] // 2, tensor.shape[0] // 4
            gate, up = tensor[:half], tensor[half:]
            state[name] = torch.cat(
                [gate[rank * quarter : (rank + 1) * quarter], up[rank * quarter : (rank + 1) * quarter]]
            )
        else:
            state[name] = tensor[rank * tensor.shape[0] // 2 : (rank + 1) * tensor.shape[0] // 2].clone()
    return state


@pytest.mark.parametrize("architecture", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_tensor_ranks(architecture: Architecture, tmp_path: Path) -> None:
    truth = random_weights(architecture)
    parts = {f"mp_rank_0{rank}": {"model": by_tensor_rank(truth, rank)} for rank in range(2)}
    check(rank_files(tmp_path / "tp2", architecture, parts, tensor_model_parallel_size=2), truth)


def layers_of(truth: dict[str, Tensor], first: int, count: int, *, ends: str = "") -> dict[str, Tensor]:
    """A stage's layers, counted from 0, with the embedding ("e") or the head ("h") where they are."""
    state = {}
    for name, tensor in truth.items():
        if name.startswith("decoder.layers."):
            layer, _, rest = name.removeprefix("decoder.layers.").partition(".")
            if first <= int(layer) < first + count:
                state[f"decoder.layers.{int(layer) - first}.{rest}"] = tensor
        elif name.startswith("embedding") == ("e" in ends) and (ends == "e" or "h" in ends):
            state[name] = tensor
    return state


def test_pipeline_stages_of_unequal_depth(tmp_path: Path) -> None:
    deep = replace(DENSE, num_layers=5)
    truth = random_weights(deep)
    parts = {
        "mp_rank_00_000": {"model": layers_of(truth, 0, 2, ends="e")},
        "mp_rank_00_001": {"model": layers_of(truth, 2, 3, ends="h")},
    }
    check(rank_files(tmp_path / "pp2", deep, parts, pipeline_model_parallel_size=2), truth)


def test_virtual_stages(tmp_path: Path) -> None:
    deep = replace(DENSE, num_layers=4)
    truth = random_weights(deep)
    parts = {
        "mp_rank_00_000": {"model0": layers_of(truth, 0, 1, ends="e"), "model1": layers_of(truth, 2, 1)},
        "mp_rank_00_001": {"model0": layers_of(truth, 1, 1), "model1": layers_of(truth, 3, 1, ends="h")},
    }
    check(rank_files(tmp_path / "vpp", deep, parts, pipeline_model_parallel_size=2), truth)


def test_more_than_ten_virtual_stages(tmp_path: Path) -> None:
    """model10 holds later layers than model9, and earlier letters."""
    deep = replace(DENSE, num_layers=12)
    truth = random_weights(deep)
    ends = {0: "e", 11: "h"}
    parts = {f"model{place}": layers_of(truth, place, 1, ends=ends.get(place, "")) for place in range(12)}
    check(rank_files(tmp_path / "vpp12", deep, {"mp_rank_00": parts}), truth)


def grouped(truth: dict[str, Tensor], numbers: list[int]) -> dict[str, Tensor]:
    """Transformer Engine's grouped experts: one weight each, under one module."""
    state = {name: tensor for name, tensor in truth.items() if "local_experts" not in name}
    for name, tensor in truth.items():
        before, mark, after = name.partition("local_experts.")
        number, _, rest = after.partition(".")
        if mark and int(number) in numbers:
            state[f"{before}{rest}{numbers.index(int(number))}"] = tensor
    return state


def in_one_matrix(truth: dict[str, Tensor], numbers: list[int]) -> dict[str, Tensor]:
    """Grouped experts of older releases: [h, experts * 2 f] and [experts * f, h], each expert transposed."""
    state = {name: tensor for name, tensor in truth.items() if "local_experts" not in name}
    for layer in range(EXPERTS.num_layers):
        prefix = f"decoder.layers.{layer}.mlp.experts"
        first, second = (
            torch.stack([truth[f"{prefix}.local_experts.{number}.linear_fc{kind}.weight"].t() for number in numbers])
            for kind in (1, 2)
        )
        state[f"{prefix}.weight1"] = first.contiguous().view(EXPERTS.hidden, -1)
        state[f"{prefix}.weight2"] = second.contiguous().view(-1, EXPERTS.hidden)
    return state


def sequential(truth: dict[str, Tensor], numbers: list[int]) -> dict[str, Tensor]:
    state = {name: tensor for name, tensor in truth.items() if "local_experts" not in name}
    for name, tensor in truth.items():
        before, mark, after = name.partition("local_experts.")
        number, _, rest = after.partition(".")
        if mark and int(number) in numbers:
            state[f"{before}{mark}{numbers.index(int(number))}.{rest}"] = tensor
    return state


@pytest.mark.parametrize("kind", [sequential, grouped, in_one_matrix])
def test_expert_ranks(kind: Callable[..., dict[str, Tensor]], tmp_path: Path) -> None:
    truth = random_weights(EXPERTS)
    parts = {f"mp_rank_00_00{rank}": {"model": kind(truth, [2 * rank, 2 * rank + 1])} for rank in range(2)}
    check(rank_files(tmp_path / "ep2", EXPERTS, parts, expert_model_parallel_size=2), truth)


@pytest.mark.parametrize("missing", ["mp_rank_01", "mp_rank_00"])
def test_a_missing_rank_is_named(missing: str, tmp_path: Path) -> None:
    truth = random_weights(DENSE)
    parts = {f"mp_rank_0{rank}": {"model": by_tensor_rank(truth, rank)} for rank in range(2)}
    folder = rank_files(tmp_path / "tp2", DENSE, parts, tensor_model_parallel_size=2)
    (folder / missing / "model_optim_rng.pt").unlink()
    with pytest.raises(CheckpointError, match=missing):
        open_checkpoint(folder)


def test_experts_split_otherwise_than_the_rest_are_refused(tmp_path: Path) -> None:
    """Tensor rank 0 then holds expert rank 0 alone, and rank 1 the other: nothing in the names says so."""
    sizes = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    truth = random_weights(EXPERTS)
    parts = {f"mp_rank_0{rank}_00{rank}": {"model": by_tensor_rank(truth, rank)} for rank in range(2)}
    with pytest.raises(CheckpointError, match="1 tensor ranks and the rest over 2, which the torch format"):
        open_checkpoint(rank_files(tmp_path / "split", EXPERTS, parts, **sizes))


def test_replicas_that_differ_are_refused(tmp_path: Path) -> None:
    truth = random_weights(DENSE)
    parts = {f"mp_rank_0{rank}": {"model": by_tensor_rank(truth, rank)} for rank in range(2)}
    name = "decoder.final_layernorm.weight"
    parts["mp_rank_01"]["model"][name] = parts["mp_rank_01"]["model"][name] + 1e-6
    folder = rank_files(tmp_path / "tp2", DENSE, parts, tensor_model_parallel_size=2)
    with pytest.raises(CheckpointError, match=r"different values of decoder\.final_layernorm\.weight"):
        open_checkpoint(folder).weights[name].read()


def written(folder: Path, architecture: Architecture, tensors: dict[str, Tensor]) -> Path:
    """A `torch_dist` checkpoint with these keys, each as one chunk."""
    folder.mkdir()
    with (folder / "data").open("wb") as stream:
        writer = DistWriter(folder, stream)
        for key, tensor in tensors.items():
            writer.add_part(key, tuple(tensor.shape), (), tensor)
    (folder / "data").rename(folder / "__0_0.distcp")
    writer.finish({"args": argparse.Namespace(**arguments(architecture))})
    return folder


def test_layers_and_experts_under_keys_of_their_own(tmp_path: Path) -> None:
    """As Megatron writes them with `singleton_local_shards`: nothing stacked, gate and up apart."""
    truth, tensors = random_weights(EXPERTS), {}
    for name, tensor in truth.items():
        key = name.replace("local_experts", "experts").replace(
            "input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"
        )
        if "linear_fc1" in key:
            tensors[f"{key}_w"], tensors[f"{key}_v"] = tensor.chunk(2)
        else:
            tensors[key] = tensor
    check(written(tmp_path / "apart", EXPERTS, tensors), truth)


def test_half_of_a_gated_layer_is_no_layer(tmp_path: Path) -> None:
    tensors = random_weights(DENSE)
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    tensors[f"{name}_w"], _ = tensors.pop(name).chunk(2)
    assert name not in open_checkpoint(written(tmp_path / "half", DENSE, tensors)).weights


@pytest.mark.parametrize("architecture", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_stacked_layers_and_experts(architecture: Architecture, tmp_path: Path) -> None:
    check(dist_checkpoint(tmp_path / "stacked", architecture), random_weights(architecture))


def test_only_the_bytes_of_the_asked_layer_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from simreg_megatron.checkpoint.dist_format import Place

    read: list[int] = []
    plain = Place.read

    def counted(self: Place):
        read.append(self.length)
        return plain(self)

    found = open_checkpoint(dist_checkpoint(tmp_path / "stacked", replace(DENSE, num_layers=6))).weights
    monkeypatch.setattr(Place, "read", counted)
    found["decoder.layers.3.mlp.linear_fc2.weight"].read()
    assert len(read) == 1


def test_learned_scalars_are_left_out_with_a_line(tmp_path: Path) -> None:
    tensors = {**random_weights(DENSE), "simreg_similarity.query": torch.zeros(1)}
    found = open_checkpoint(written(tmp_path / "learned", DENSE, tensors))
    assert found.notes == [
        "left out: simreg_similarity.query, which SimReg trained and the language model does not use"
    ]


def test_a_router_with_a_bias_is_refused_by_its_setting(tmp_path: Path) -> None:
    tensors = {**random_weights(EXPERTS), "decoder.layers.mlp.router.qb_beta": torch.zeros(2, 4)}
    with pytest.raises(CheckpointError, match=r"qb_beta \(of moe_router_load_balancing_type = quantile_balancing\)"):
        open_checkpoint(written(tmp_path / "balanced", EXPERTS, tensors))


class Backend(enum.Enum):
    unfused = 3


def test_arguments_of_classes_that_are_not_plain_are_inert(tmp_path: Path) -> None:
    """Enumerations of Megatron's are called with their value when they are unpickled."""
    Backend.__module__, Backend.__qualname__ = "megatron.core.transformer.enums", "AttnBackend"
    try:
        folder = rank_files(tmp_path / "one", DENSE, {"mp_rank_00": {"model": random_weights(DENSE)}})
    finally:
        Backend.__module__, Backend.__qualname__ = __name__, "Backend"
    args = open_checkpoint(folder).args
    assert args["exit_signal"].arguments == (15,) and args["num_layers"] == 2


def test_a_signal_that_python_3_10_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes --exit-signal by its name; other names of that module stay refused."""
    truth = random_weights(DENSE)
    for name in ("SIGTERM", "raise_signal"):
        monkeypatch.setattr(signal.Signals, "__reduce_ex__", lambda self, protocol, name=name: name)
        monkeypatch.setattr(signal, name, signal.SIGTERM)
        folder = rank_files(tmp_path / name, DENSE, {"mp_rank_00": {"model": truth}})
        if name == "SIGTERM":
            check(folder, truth)
            assert open_checkpoint(folder).args["num_layers"] == 2
        else:
            with pytest.raises(CheckpointError, match=r"asks for signal\.raise_signal to be called"):
                open_checkpoint(folder)
