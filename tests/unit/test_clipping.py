# SPDX-License-Identifier: Apache-2.0
"""Where AdaGC would not know the gradients, it is refused by name; what a checkpoint holds is put in place by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from simreg_megatron.config import AdaGCConfig
from simreg_megatron.plugin import compat
from simreg_megatron.plugin.clip import clipping, gradients
from simreg_megatron.plugin.clip.clipping import Clipping, loading, saving
from simreg_megatron.plugin.clip.parameters import _counted_experts, _whole

pytestmark = [pytest.mark.megatron, pytest.mark.filterwarnings("ignore")]


STEPPED = SimpleNamespace(step_with_ready_grads=None, get_grad_norm=None)


@pytest.mark.parametrize(
    "flag",
    ["use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp", "optimizer_cpu_offload", "optimizer_cuda_graph"],
)
def test_hidden_gradients_are_refused(flag: str) -> None:
    with pytest.raises(NotImplementedError, match=f"--{flag.replace('_', '-')} keeps the gradients: drop one of them"):
        gradients.refuse_hidden(STEPPED, SimpleNamespace(**{flag: True}))
    gradients.refuse_hidden(STEPPED, SimpleNamespace(**{flag: False}))


def test_a_release_without_the_seam_is_named() -> None:
    lacks = SimpleNamespace(get_grad_norm=None)
    with pytest.raises(
        compat.MegatronSeamError, match=r"SimpleNamespace has no step_with_ready_grads; use megatron-core"
    ):
        gradients.refuse_hidden(lacks, SimpleNamespace())


def test_an_unknown_optimizer_is_named() -> None:
    with pytest.raises(NotImplementedError, match="--adagc does not know SimpleNamespace: use Adam or SGD"):
        list(gradients.stepped_on(SimpleNamespace()))


def sharding_optimizer(**others: Any) -> SimpleNamespace:
    """A group of one float32 and two bfloat16 parameters, in the lists that DistributedOptimizer keeps."""
    return SimpleNamespace(
        model_float16_groups=[["a", "b"]],
        shard_float16_groups=[["a16", "b16"]],
        shard_fp32_from_float16_groups=[["a32", "b32"]],
        model_fp32_groups=[["c"]],
        shard_fp32_groups=[["c32"]],
        **others,
    )


def test_data_types_of_one_group_are_not_mixed_up() -> None:
    found = list(gradients.stepped_on(sharding_optimizer()))
    assert [(held.tensor, held.parameter) for held in found] == [("a32", "a"), ("b32", "b"), ("c32", "c")]
    assert all(held.counts for held in found)


def test_further_instances_of_the_optimizer_do_not_count() -> None:
    assert not any(
        held.counts for held in gradients.stepped_on(sharding_optimizer(distributed_optimizer_instance_id=1))
    )


def test_the_precision_aware_optimizer_steps_on_the_models_own_type() -> None:
    optimizer = sharding_optimizer()
    optimizer.shard_fp32_from_float16_groups = [[None, None]]
    assert [held.tensor for held in gradients.stepped_on(optimizer)] == ["a16", "b16", "c32"]
    shard = torch.zeros(2, dtype=torch.bfloat16)
    shard.decoupled_grad = torch.ones(2)
    assert gradients.gradient_of(shard) is shard.decoupled_grad
    shard.decoupled_grad = None
    assert gradients.gradient_of(shard) is None


def test_weights_cut_further_are_refused() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.is_gtp_weight_remat = True
    with pytest.raises(NotImplementedError, match=r"--tensor-parallel-num-weight-shards cuts mlp\.weight: drop one"):
        _whole("mlp.weight", weight)


def test_experts_in_one_tensor_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="holds all of a rank's experts in one tensor"):
        _counted_experts("decoder.layers.0.mlp.experts.weight1", SimpleNamespace())


def test_experts_are_counted_over_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, "get_expert_model_parallel_rank", lambda: 3)
    config = SimpleNamespace(num_moe_experts=8, expert_model_parallel_size=4)
    for name, counted in {
        "mlp.experts.local_experts.1.linear_fc1.weight": "mlp.experts.local_experts.7.linear_fc1.weight",
        "mlp.experts.linear_fc2.weight0": "mlp.experts.linear_fc2.weight6",
        "mlp.experts.linear_fc1.bias1": "mlp.experts.linear_fc1.bias7",
        "mlp.linear_fc1.weight": "mlp.linear_fc1.weight",
        "mlp.shared_experts.linear_fc1.weight": "mlp.shared_experts.linear_fc1.weight",
    }.items():
        assert _counted_experts(name, config) == counted


def attached(names: list[str], **settings: Any) -> Clipping:
    """As `attach` leaves it, without an optimizer."""
    made = Clipping(AdaGCConfig(**settings))
    made._names = names
    made._adagc = clipping.AdaGC(len(names), variant=made.config.variant)
    return made


def test_averages_go_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    before, after = attached(["a", "b", "c"]), attached(["c", "d", "a"])
    before._adagc.gammas, before._adagc.steps = torch.tensor([1.0, 2.0, 3.0]), 7
    after.load_state_dict(before.state_dict())
    assert after._adagc.gammas.tolist() == [3.0, float("inf"), 1.0] and after._adagc.steps == 7
    said = capsys.readouterr().out
    assert "has parameters that are not in the model: b" in said and "lacks: d" in said


def test_another_variant_starts_anew(capsys: pytest.CaptureFixture[str]) -> None:
    before, after = attached(["a"]), attached(["a"], variant="global")
    before._adagc.steps = 7
    after.load_state_dict(before.state_dict())
    assert after._adagc.steps == 0
    assert "averages are of variant clipped, not global, so the warm-up starts now" in capsys.readouterr().out


def test_the_schedulers_state_is_left_alone_without_adagc(capsys: pytest.CaptureFixture[str]) -> None:
    state = {"num_steps": 3}
    assert saving(lambda: None, lambda scheduler: state)(None) is state
    seen: list[Any] = []
    load = loading(lambda: None, lambda scheduler, given: seen.append(given))
    load(None, state)
    assert seen == [state] and not capsys.readouterr().out
    load(None, {**state, clipping.STATE_KEY: {}})
    assert "written with --adagc, and this run continues without it" in capsys.readouterr().out
