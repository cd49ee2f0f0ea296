# SPDX-License-Identifier: Apache-2.0
"""AdaGC is refused by name if it could not know the gradients; a checkpoint's state is restored by name."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from simreg_megatron.adagc import clipping, gradients
from simreg_megatron.adagc.clipping import Clipping
from simreg_megatron.adagc.gradients import _counted_experts, model_parameters
from simreg_megatron.config import AdaGCConfig
from simreg_megatron.plugin import installation, loop

pytestmark = [pytest.mark.megatron, pytest.mark.filterwarnings("ignore")]


HIDE = ["use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp", "optimizer_cpu_offload", "optimizer_cuda_graph"]


@pytest.mark.parametrize("flag", HIDE)
def test_hidden_gradients_are_refused(flag: str) -> None:
    with pytest.raises(NotImplementedError, match=f"--{flag.replace('_', '-')} keeps the gradients: drop one of them"):
        gradients.refuse_hidden(SimpleNamespace(**{flag: True}))
    gradients.refuse_hidden(SimpleNamespace(**{flag: False}))


def test_an_unknown_optimizer_is_named() -> None:
    with pytest.raises(NotImplementedError, match="--adagc does not know SimpleNamespace: use Adam or SGD"):
        list(gradients.main_parameters(SimpleNamespace()))


def sharding_optimizer(**others: Any) -> SimpleNamespace:
    """A group of one float32 and two bfloat16 parameters, in the lists that DistributedOptimizer keeps."""
    return SimpleNamespace(
        model_float16_groups=[["a", "b"]], shard_float16_groups=[["a16", "b16"]],
        shard_fp32_from_float16_groups=[["a32", "b32"]], model_fp32_groups=[["c"]], shard_fp32_groups=[["c32"]],
        **others,
    )  # fmt: skip


def test_data_types_of_one_group_are_not_mixed_up() -> None:
    listed = list(gradients.main_parameters(sharding_optimizer()))
    assert listed == [("a32", "a", True), ("b32", "b", True), ("c32", "c", True)]


def test_the_precision_aware_optimizer_steps_on_the_models_own_type() -> None:
    optimizer = sharding_optimizer()
    optimizer.shard_fp32_from_float16_groups = [[None, None]]
    assert [main.tensor for main in gradients.main_parameters(optimizer)] == ["a16", "b16", "c32"]
    shard = torch.zeros(2, dtype=torch.bfloat16)
    shard.decoupled_grad = torch.ones(2)
    assert gradients.gradient_of(shard) is shard.decoupled_grad
    shard.decoupled_grad = None
    assert gradients.gradient_of(shard) is None


@pytest.mark.parametrize("name", ["weight1", "linear_fc1.weight", "linear_fc2.bias"])
def test_experts_in_one_tensor_are_refused(name: str) -> None:
    """Those of --moe-grouped-gemm up to 0.17, and of --moe-single-grouped-weight."""
    with pytest.raises(NotImplementedError, match="holds all of a rank's experts in one tensor"):
        _counted_experts(f"decoder.layers.0.mlp.experts.{name}", SimpleNamespace())


def on_two_tensor_ranks(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    from megatron.core import parallel_state

    for kind in ("tensor_model", "expert_tensor"):
        monkeypatch.setattr(parallel_state, f"get_{kind}_parallel_rank", lambda: rank)
        monkeypatch.setattr(parallel_state, f"get_{kind}_parallel_world_size", lambda: 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_megatron_does_not_mark_is_known_by_name(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The offsets of a trained softmax, one for each head of the rank: by its mark, half would count."""
    on_two_tensor_ranks(monkeypatch, rank)
    model = torch.nn.Module()
    model.config = SimpleNamespace()
    model.core_attention = torch.nn.Module()
    model.core_attention.softmax_offset = torch.nn.Parameter(torch.zeros(4))
    model.core_attention.norm = torch.nn.Parameter(torch.zeros(4))
    offsets, norm = model_parameters([model])
    assert (offsets.is_counted, offsets.whole) == (True, 8)
    assert (norm.is_counted, norm.whole) == (rank == 0, 4)


def attached(names: list[str], **settings: Any) -> Clipping:
    """As `attach` leaves it, without an optimizer."""
    made = Clipping(AdaGCConfig(**settings))
    made._names = names
    made._adagc = clipping.AdaGC(len(names), variant=made.config.variant)
    return made


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Install the attributes that the scheduler's wrappers read."""
    made = SimpleNamespace(clipping=None)
    monkeypatch.setattr(installation, "_installation", made)
    return made


def test_the_log_has_means_over_steps_and_the_smallest_coefficient() -> None:
    made = attached(["a"])
    made._sums = 2, torch.tensor(1.0), torch.tensor(0.5), torch.tensor(6.0)  # steps, shares, smallest, norms
    assert [value.item() for value in made.means(reset=True).values()] == [0.5, 0.5, 3.0]
    assert made.means(reset=False) == {}


def test_averages_go_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    before, after = attached(["a", "b", "c"]), attached(["c", "d", "a"])
    before._adagc.gammas, before._adagc.steps = torch.tensor([1.0, 2.0, 3.0]), 7
    after.load_state_dict(before.state_dict())
    assert after._adagc.gammas.tolist() == [3.0, float("inf"), 1.0] and after._adagc.steps == 7
    said = capsys.readouterr().out
    assert "has parameters that are not in the model: b" in said and "lacks: d" in said


LAYERS = ["decoder.layers.1.mlp.weight", "decoder.layers.1.attention.weight"]


OTHERS = [
    (LAYERS, {"variant": "global"}, "averages are of variant clipped, not global, so the warm-up starts now"),
    # A GPT's second layer is another one in a hybrid model, under the same number.
    (["decoder.layers.2.mlp.weight", LAYERS[1]], {}, "built otherwise, so its averages may be of other parameters"),
]


@pytest.mark.parametrize(("names", "settings", "sentence"), OTHERS)
def test_averages_of_other_parameters_start_over(names: list[str], settings: dict, sentence: str, capsys) -> None:
    before, after = attached(LAYERS), attached(names, **settings)
    before._adagc.gammas, before._adagc.steps = torch.tensor([1.0, 2.0]), 7
    after.load_state_dict(before.state_dict())
    assert after._adagc.gammas.isinf().all() and after._adagc.steps == 0
    assert sentence in capsys.readouterr().out


def test_a_conversion_keeps_the_averages(here: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """It loads, saves and ends before there is an optimizer to clip for."""
    before = attached(["a"])
    before._adagc.gammas, before._adagc.steps = torch.tensor([2.0]), 7
    save = partial(loop.save_adagc, lambda scheduler: {"num_steps": 3})
    load = partial(loop.load_adagc, lambda scheduler, given: None)
    here.clipping = before
    written = save(None)
    here.clipping = Clipping(AdaGCConfig())
    assert save(None) == {"num_steps": 3}
    load(None, written)
    assert save(None) == written


def test_megatron_clips_again_after_the_end() -> None:
    made, optimizer = attached(["a"]), SimpleNamespace(get_grad_norm=lambda: 1.0, step_with_ready_grads=lambda: True)
    before = dict(vars(optimizer))
    made._wrap(optimizer)
    assert vars(optimizer) != before
    made.detach()
    assert vars(optimizer) == before
