# SPDX-License-Identifier: Apache-2.0
"""Which states inside the decoder can be asked for, and a sentence for those that cannot."""

from types import SimpleNamespace

import pytest
import torch

from simreg_megatron import SimRegConfig
from simreg_megatron.plugin import compat, refusals, tokens


def test_layers_are_read() -> None:
    given = {"final": ("final",), "12, 3,final,3": (3, 12, "final"), (2, "final"): (2, "final"), 7: (7,)}
    assert {layers: SimRegConfig(layers=layers).layers for layers in given} == given


def test_a_placement_without_effect_is_refused() -> None:
    with pytest.raises(ValueError, match="has no effect on numbered layers"):
        SimRegConfig(layers="3", placement="pre-norm")
    assert SimRegConfig(layers="3,final", placement="pre-norm").looks_inside
    assert not SimRegConfig().looks_inside


OFFLOADS = {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn", "attn_norm"]}


NOT_CAUGHT = [
    ({"layers": 2}, {"distribute_saved_activations": True}, "--distribute-saved-activations takes the states"),
    ({"layers": 2}, OFFLOADS, "--offload-modules attn_norm frees what enters a layer"),
    ({"layers": 2}, {"enable_mhc_connections": True}, "several streams pass between layers"),
    ({"layers": 2}, {"enable_hyper_connections": True}, "with --enable-hyper-connections several streams"),
    ({"layers": 2}, {"cuda_graph_impl": "local"}, "CUDA graphs replay layers .* drop --cuda-graph-impl, or"),
    ({"layers": 2}, {"enable_cuda_graph": True}, "CUDA graphs replay layers .* drop --enable-cuda-graph, or"),
    ({"layers": 2}, {"overlap_moe_expert_parallel_comm": True}, "never calls the decoder's layers"),
]


@pytest.mark.parametrize(("config", "flags", "sentence"), NOT_CAUGHT)
def test_what_cannot_be_caught_is_refused(config: dict, flags: dict, sentence: str) -> None:
    args = SimpleNamespace(log_interval=1, num_layers=8, **flags)
    with pytest.raises(NotImplementedError, match=sentence):
        refusals.refuse_arguments(args, SimRegConfig(lambda_=1, **config))
    refusals.refuse_arguments(args, SimRegConfig(lambda_=1))


def block(*layers: int, last: bool = True, **config):
    """A TransformerBlock as far as refusals look at it."""
    from megatron.core.transformer.transformer_block import TransformerBlock

    made = TransformerBlock.__new__(TransformerBlock)
    torch.nn.Module.__init__(made)
    made.layers = [SimpleNamespace(layer_number=number) for number in layers]
    made.final_layernorm, made.post_process = None, last
    made.config = SimpleNamespace(**{"recompute_granularity": None, "recompute_method": None, **config})
    return made


@pytest.mark.megatron
def test_decoders_that_lack_a_state_are_refused() -> None:
    refusals.refuse_decoder(SimRegConfig(layers="5,6,final"), block(5, 6))
    assert compat.unwrapped((block(5), block(6)))[1].layers[0].layer_number == 6, "model chunks in a tuple"
    with pytest.raises(NotImplementedError, match=r"4 lies on an earlier pipeline stage .* layers 5 to 6: name layers"):
        refusals.refuse_decoder(SimRegConfig(layers="4,6,final"), block(5, 6))
    with pytest.raises(ValueError, match=r"--simreg-layers 7 is beyond the model, whose last layer is 6"):
        refusals.refuse_decoder(SimRegConfig(layers="5,7"), block(5, 6))
    with pytest.raises(NotImplementedError, match="--simreg-layers 6 and final are the same states"):
        refusals.refuse_decoder(SimRegConfig(layers="6,final", placement="pre-norm"), block(5, 6))
    with pytest.raises(NotImplementedError, match="needs the final norm on the stage"):
        refusals.refuse_decoder(SimRegConfig(placement="pre-norm"), block(5, 6))
    with pytest.raises(NotImplementedError, match="only the final states of a Linear"):
        refusals.refuse_decoder(SimRegConfig(layers=1), torch.nn.Linear(1, 1))


GROUPS = [(1, "uniform", None), (3, "block", None), (2, "uniform", 6), (3, "uniform", 7), (8, "uniform", 8)]


@pytest.mark.megatron
@pytest.mark.parametrize(("size", "method", "groups_last"), GROUPS)
def test_layers_inside_a_group_that_is_recomputed_as_one_are_refused(size, method, groups_last) -> None:
    """Layers 5 to 8 are here; a group ends with its last layer, or with the last one here."""
    flags = {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": size}
    decoder = block(5, 6, 7, 8, last=False, **flags)
    refusals.refuse_decoder(SimRegConfig(layers=f"{groups_last or 5},8"), decoder)
    if groups_last is not None:
        sentence = f"5 lies inside a group of {size} layers .* last layer, {groups_last},"
        with pytest.raises(NotImplementedError, match=sentence):
            refusals.refuse_decoder(SimRegConfig(layers=5), decoder)


@pytest.mark.megatron
def test_a_layer_whose_hook_did_not_fire_is_not_taken_for_the_decoders_output() -> None:
    """In a loop that calls `layer.forward`; behind the last layer nothing follows that could be watched."""
    decoder = block(1, 2, 3, 4)
    decoder.layers = torch.nn.ModuleList([torch.nn.Identity() for _ in range(4)])
    for number, layer in enumerate(decoder.layers, 1):
        layer.layer_number = number
    states = tokens.InnerStates(SimRegConfig(lambda_=1, layers="2,4"))
    states.catch(lambda decoder: torch.zeros(1), decoder)
    assert list(states._caught[decoder]) == [4]
    frozen = tokens.InnerStates(SimRegConfig(lambda_=1, layers="4"))
    frozen.catch(lambda decoder: torch.zeros(1), decoder)
    with pytest.raises(NotImplementedError, match="the states of layer 4 were computed without a graph"):
        frozen.take(SimpleNamespace(decoder=decoder), torch.zeros(1))
