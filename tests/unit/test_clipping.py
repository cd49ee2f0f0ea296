# SPDX-License-Identifier: Apache-2.0
"""Where AdaGC would not know the gradients, it is refused by name; what a checkpoint holds is put in place by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from simreg_megatron.config import AdaGCConfig
from simreg_megatron.plugin import clipping, compat
from simreg_megatron.plugin.clipping import Clipping, loading, saving
from simreg_megatron.plugin.parameters import _counted_experts

pytestmark = [pytest.mark.megatron, pytest.mark.filterwarnings("ignore")]


def refusal(optimizer: Any, monkeypatch: pytest.MonkeyPatch, **args: bool) -> None:
    from megatron.training import global_vars

    monkeypatch.setattr(global_vars, "get_args", lambda: SimpleNamespace(**args))
    clipping._refuse_optimizer(optimizer)


STEPPED = SimpleNamespace(step_with_ready_grads=None, get_grad_norm=None)


@pytest.mark.parametrize(
    "flag", ["use_torch_fsdp2", "use_megatron_fsdp", "optimizer_cpu_offload", "optimizer_cuda_graph"]
)
def test_hidden_gradients_are_refused(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotImplementedError, match=f"--{flag.replace('_', '-')} keeps the gradients: drop one of them"):
        refusal(STEPPED, monkeypatch, **{flag: True})
    refusal(STEPPED, monkeypatch, **{flag: False})


def test_a_release_without_the_seam_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        compat.MegatronSeamError, match=r"SimpleNamespace has no step_with_ready_grads; use megatron-core"
    ):
        refusal(SimpleNamespace(), monkeypatch)


def test_an_unknown_optimizer_is_named() -> None:
    with pytest.raises(NotImplementedError, match="--adagc does not know SimpleNamespace: use Adam or SGD"):
        list(clipping._stepped_on(SimpleNamespace()))


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
    assert "knows parameters that are not in the model: b" in said and "lacks: d" in said


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
    assert "written with --adagc, and this run goes on without it" in capsys.readouterr().out
