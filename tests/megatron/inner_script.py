# SPDX-License-Identifier: Apache-2.0
"""States from inside the decoder: SimReg on them equals the sum written out, on megatron-core alone."""

import pytest
import torch

from simreg_megatron import SimRegConfig, install, uninstall
from simreg_megatron.cpu import backend as cpu_backend
from simreg_megatron.losses import simreg_loss
from tests.megatron.own_script import LENGTH, build_model, causal_mask, gradients, sample, start

CASES = (((1,), "post-norm"), ((1, 2, "final"), "post-norm"), (("final",), "pre-norm"), ((1, "final"), "pre-norm"))


def states_of(model, layers, placement: str, tokens, labels) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The mean loss and the wanted states, caught by plain hooks."""
    caught = {}

    def keep(name):
        return lambda module, inputs, output: caught.update({name: output[0] if type(output) is tuple else output})

    hooks = [model.decoder.layers[n - 1].register_forward_hook(keep(n)) for n in layers if n != "final"]
    hooks.append(model.decoder.register_forward_hook(keep("final")))
    norm = model.decoder.final_layernorm
    hooks.append(norm.register_forward_pre_hook(lambda module, inputs: caught.update(before=inputs[0])))
    loss = model(tokens, torch.arange(LENGTH).expand_as(tokens), causal_mask(), labels=labels).mean()
    for hook in hooks:
        hook.remove()
    if placement == "pre-norm":
        caught["final"] = caught["before"]
    return loss, [caught[name] for name in layers]


def check(model, layers, placement: str, tokens, labels) -> dict[str, torch.Tensor]:
    config = SimRegConfig(lambda_=2, temperature=0.5, chunk_size=12, layers=layers, placement=placement)
    model.zero_grad()
    loss, states = states_of(model, layers, placement, tokens, labels)
    terms = [simreg_loss(state.transpose(0, 1), labels, temperature=0.5, chunk_size=12) for state in states]
    (loss + 2 * sum(terms)).backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    install(config=config)
    value, got = gradients(model, tokens, labels)
    uninstall()
    assert torch.equal(value, loss.detach()), "the value is the language-model loss"
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-7, msg=f"{layers} {placement} {name}")
    return got


def cost_of_recompute(model, tokens, labels, layers) -> tuple[int, int, dict[str, torch.Tensor]]:
    """Runs of a layer in one step, bytes that the forward keeps for the backward, and the gradients."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    kept, runs, forward = {}, [], TransformerLayer.forward

    def counted(*args, **kwargs):
        runs.append(None)
        return forward(*args, **kwargs)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not runs or len(runs) <= len(model.decoder.layers):  # else the backward runs it again
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    if layers:
        install(config=SimRegConfig(lambda_=2, temperature=0.5, chunk_size=12, layers=layers, impl="reference"))
    TransformerLayer.forward = counted
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            _, got = gradients(model, tokens, labels)
    finally:
        TransformerLayer.forward = forward
        uninstall()
    return len(runs), sum(kept.values()), got


def check_full_recompute(model, tokens, labels) -> None:
    """The states are those that recompute keeps: no layer runs more often, and no activation of one is kept."""
    _, without, wanted = cost_of_recompute(model, tokens, labels, (1, 2))
    runs, plain, _ = cost_of_recompute(model, tokens, labels, ())
    terms = without - plain
    model.config.recompute_granularity, model.config.recompute_method = "full", "uniform"
    model.config.recompute_num_layers = 1
    again, recomputed, _ = cost_of_recompute(model, tokens, labels, ())
    found, kept, got = cost_of_recompute(model, tokens, labels, (1, 2))
    print(f"full recompute: {runs} runs of a layer, then {again}, with SimReg {found}; "
          f"kept {plain} bytes, then {recomputed}, with SimReg {kept} (its terms alone {terms})")  # fmt: skip
    assert (runs, again, found) == (2, 4, 4) and recomputed < plain
    assert kept - recomputed == terms > 0, "what the terms keep, as without recompute"
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-8, msg=name)  # sums in another order
    model.config.recompute_num_layers = 2
    with pytest.raises(NotImplementedError, match="--simreg-layers 1 lies inside a group of 2 layers"):
        cost_of_recompute(model, tokens, labels, (1,))


def main() -> None:
    cpu_backend.activate()
    from megatron.core.transformer.transformer_block import TransformerBlock

    start()
    model = build_model()
    with torch.no_grad():  # with a gain of 1 everywhere, states before and after the norm would have equal cosines
        for parameter in model.decoder.final_layernorm.parameters():
            parameter.copy_(1 + 0.5 * torch.randn_like(parameter))
    tokens, labels = sample()

    original = TransformerBlock.forward
    seen = [check(model, layers, placement, tokens, labels) for layers, placement in CASES]
    assert TransformerBlock.forward is original, "uninstall gives it back"
    weight = "decoder.layers.0.mlp.linear_fc1.weight"
    for i, one in enumerate(seen):
        for other in seen[i + 1 :]:
            assert not torch.allclose(one[weight], other[weight], rtol=1e-2), "the cases must differ"

    install(config=SimRegConfig(lambda_=2, layers=(3,)))
    with pytest.raises(ValueError, match="--simreg-layers 3 is beyond the model, whose last layer is 2"):
        gradients(model, tokens, labels)
    uninstall()
    check_full_recompute(model, tokens, labels)
    print("inner script: all as expected")
