# SPDX-License-Identifier: Apache-2.0
"""Which states inside the decoder can be asked for, and a sentence for those that cannot."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from simreg_megatron import SimRegConfig
from simreg_megatron.plugin import compat, hooks, inner


@pytest.mark.parametrize(
    ("given", "layers"),
    [
        ("final", ("final",)),
        ("12, 3,final,3", (3, 12, "final")),
        ((2, "final"), (2, "final")),
        (7, (7,)),
    ],
)
def test_layers_are_read(given, layers) -> None:
    assert SimRegConfig(layers=given).layers == layers


@pytest.mark.parametrize("given", ["last", "0", "-1", "", "3,,4", "1.5"])
def test_other_layers_are_refused(given: str) -> None:
    with pytest.raises(ValueError, match="must be final, or layer numbers from 1"):
        SimRegConfig(layers=given)


def test_a_placement_without_effect_is_refused() -> None:
    with pytest.raises(ValueError, match="has no effect on numbered layers"):
        SimRegConfig(layers="3", placement="pre-norm")
    assert SimRegConfig(layers="3,final", placement="pre-norm").looks_inside
    assert not SimRegConfig().looks_inside


@pytest.mark.parametrize(
    ("config", "flags", "sentence"),
    [
        ({"layers": 9}, {}, "--simreg-layers 9 is beyond the model, which has layers 1 to 8"),
        ({"layers": 2}, {"recompute_granularity": "full"}, "full recompute runs each layer twice"),
        ({"layers": 2}, {"cuda_graph_impl": "local"}, "CUDA graphs replay layers without their hooks"),
        ({"layers": 2}, {"overlap_moe_expert_parallel_comm": True}, "never calls the decoder's layers"),
        ({"placement": "pre-norm"}, {"overlap_moe_expert_parallel_comm": True}, "never calls the decoder's layers"),
    ],
)
def test_what_cannot_be_caught_is_refused(config: dict, flags: dict, sentence: str) -> None:
    args = SimpleNamespace(log_interval=1, num_layers=8, **flags)
    error = ValueError if "beyond" in sentence else NotImplementedError
    with pytest.raises(error, match=sentence):
        hooks._refuse_arguments(args, SimRegConfig(lambda_=1, **config))
    hooks._refuse_arguments(args, SimRegConfig(lambda_=1))


def test_the_final_states_are_caught_under_full_recompute() -> None:
    args = SimpleNamespace(log_interval=1, num_layers=8, recompute_granularity="full")
    hooks._refuse_arguments(args, SimRegConfig(lambda_=1, placement="pre-norm"))


@pytest.mark.megatron
def test_states_of_other_stages_and_stacks_are_refused() -> None:
    from megatron.core.transformer.transformer_block import TransformerBlock

    block = TransformerBlock.__new__(TransformerBlock)
    torch.nn.Module.__init__(block)
    block.layers = [SimpleNamespace(layer_number=5), SimpleNamespace(layer_number=6)]
    block.final_layernorm = None
    with pytest.raises(NotImplementedError, match=r"4 lies on an earlier pipeline stage.*holds layers 5 to 6"):
        inner.refuse_decoder(SimRegConfig(layers=4), block)
    inner.refuse_decoder(SimRegConfig(layers="5,6,final"), block)
    with pytest.raises(NotImplementedError, match="needs the final norm on the stage"):
        inner.refuse_decoder(SimRegConfig(placement="pre-norm"), block)
    with pytest.raises(NotImplementedError, match="the final states only of a Linear"):
        inner.refuse_decoder(SimRegConfig(layers=1), torch.nn.Linear(1, 1))


@pytest.mark.megatron
def test_every_model_of_this_release_has_its_seam() -> None:
    names = [f"{seam.owner}.{seam.name}" for seam in compat.model_seams()]
    assert names == ["GPTModel._postprocess", "HybridModel.forward"]


def test_a_release_without_postprocess_gets_the_forward_form(monkeypatch: pytest.MonkeyPatch) -> None:
    class OldModel:
        def forward(self, input_ids, labels=None) -> None: ...

    monkeypatch.setattr(compat.Seam, "holder", lambda seam: OldModel)
    seams = compat.model_seams()
    assert seams[0] is compat.FORWARD_SEAMS[0]
