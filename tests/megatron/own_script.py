# SPDX-License-Identifier: Apache-2.0
"""A training script that uses megatron-core alone: no Megatron flags are parsed, `install(config=...)` decides."""

from typing import Any

import pytest
import torch

from simreg_megatron import SimRegConfig, install, uninstall
from simreg_megatron.cpu import backend as cpu_backend
from simreg_megatron.losses import simreg_loss
from simreg_megatron.plugin import compat

LENGTH, VOCABULARY, WIDTH = 32, 64, 32
CONFIG = SimRegConfig(lambda_=2, temperature=0.5, chunk_size=12)


def start() -> None:
    """All processes as tensor-parallel ranks, by Megatron's own functions."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.distributed.init_process_group()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=torch.distributed.get_world_size())
    model_parallel_cuda_manual_seed(1)


def build_model(model_class: Any = None, length: int = LENGTH, positions="learned_absolute", **others: Any) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2, hidden_size=WIDTH, num_attention_heads=4, use_cpu_initialization=True, hidden_dropout=0.0,
        attention_dropout=0.0, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
        bias_dropout_fusion=False, persist_layer_norm=False,
        tensor_model_parallel_size=torch.distributed.get_world_size(), **others,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(normalization=others.get("normalization"))
    options = {"share_embeddings_and_output_weights": False, "position_embedding_type": positions}
    return (model_class or GPTModel)(config, spec, VOCABULARY, length, **options).train()


def causal_mask(device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.ones(LENGTH, LENGTH, device=device).triu(1).bool()[None, None]


def positions_of(tokens: torch.Tensor) -> torch.Tensor:
    return torch.arange(LENGTH, device=tokens.device).expand_as(tokens)


def gradients(model, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(tokens, positions_of(tokens), causal_mask(tokens.device), labels=labels).mean()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def expected_gradients(model, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """The sum written out: mean loss + lambda * mean SimReg of what the decoder hands to the output layer."""
    caught = []
    hook = model.decoder.register_forward_hook(lambda module, inputs, output: caught.append(output))
    model.zero_grad()
    loss = model(tokens, positions_of(tokens), causal_mask(tokens.device), labels=labels).mean()
    hook.remove()
    term = simreg_loss(caught[0].transpose(0, 1), labels, temperature=0.5, chunk_size=12)
    (loss + 2 * term).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def sample(device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 8, (2, LENGTH + 1), generator=torch.Generator().manual_seed(4)).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def check(model, owner: type, name: str, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Compare the gradient with SimReg with the written-out sum's; the loss stays, and `uninstall` leaves nothing."""
    tokens, labels = sample(device)
    original = getattr(owner, name)
    plain_loss, plain = gradients(model, tokens, labels)
    wanted = expected_gradients(model, tokens, labels)
    install(config=CONFIG)
    install(config=CONFIG)  # twice is once
    loss, got = gradients(model, tokens, labels)
    assert torch.equal(loss, plain_loss), "the value is the language-model loss"
    for key, gradient in wanted.items():
        torch.testing.assert_close(got[key], gradient, rtol=1e-4, atol=1e-6 if device == "cuda" else 1e-7, msg=key)
    share = sum((got[n] - plain[n]).norm() ** 2 for n in got) ** 0.5 / sum(g.norm() ** 2 for g in got.values()) ** 0.5
    assert share > 0.1, share
    with pytest.raises(ValueError, match="installed with other settings already"):
        install(config=SimRegConfig(lambda_=3))
    uninstall()
    assert getattr(owner, name) is original
    assert torch.equal(gradients(model, tokens, labels)[0], plain_loss)
    return got


def main() -> None:
    cpu_backend.activate()
    from megatron.core.models.gpt import GPTModel

    start()
    model, (tokens, labels) = build_model(), sample()
    plain = gradients(model, tokens, labels)[1]
    got = check(model, GPTModel, "_postprocess")
    install(config=CONFIG)
    model.eval()
    with torch.no_grad():  # evaluation is Megatron's own
        model(tokens, positions_of(tokens), causal_mask(), labels=labels)
    model.train()
    uninstall()
    again = gradients(model, tokens, labels)[1]
    assert all(torch.equal(again[name], plain[name]) for name in plain)
    compat.model_seams = lambda: (compat.FORWARD_SEAMS[0],)  # as in releases where `forward` computes the loss
    other = check(model, GPTModel, "_postprocess")
    assert all(torch.equal(other[name], got[name]) for name in got)
    print("own script: all as expected")
