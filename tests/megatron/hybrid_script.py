# SPDX-License-Identifier: Apache-2.0
"""A HybridModel, which computes its loss inside `forward`: attention and MLP layers of plain torch in a hybrid stack.

Mamba layers need kernels of a GPU; SimReg meets them no differently, for it looks at what the whole stack returns.
"""

from __future__ import annotations

import os

import torch

from simreg_megatron import install, uninstall
from simreg_megatron.cpu import backend as cpu_backend
from tests.megatron.own_script import CONFIG, LENGTH, VOCABULARY, WIDTH, expected_gradients, gradients


def build_model():
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer import TransformerConfig

    from simreg_megatron.cpu.hybrid import LOCAL

    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=4, hidden_size=WIDTH, num_attention_heads=4, use_cpu_initialization=True, hidden_dropout=0.0,
        attention_dropout=0.0, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
        bias_dropout_fusion=False, persist_layer_norm=False, is_hybrid_model=True,
    )  # fmt: skip
    return HybridModel(config, LOCAL, VOCABULARY, LENGTH, hybrid_layer_pattern="*-*-").train()


def start() -> None:
    """All processes as tensor-parallel ranks, by Megatron's own functions."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    os.environ.setdefault("MASTER_PORT", "29513")
    torch.distributed.init_process_group()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=torch.distributed.get_world_size())
    model_parallel_cuda_manual_seed(1)


def check(model, device: str) -> None:
    """The gradient with SimReg is the written-out sum's, the loss is untouched, and `uninstall` leaves nothing."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    tokens = torch.randint(0, 8, (2, LENGTH + 1), generator=torch.Generator().manual_seed(4)).to(device)
    tokens, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    original = HybridModel.forward
    plain_loss, plain = gradients(model, tokens, labels)
    wanted = expected_gradients(model, tokens, labels)
    install(config=CONFIG)
    loss, got = gradients(model, tokens, labels)
    assert torch.equal(loss, plain_loss), "the value is the language-model loss"
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6 if device == "cuda" else 1e-7, msg=name)
    share = sum((got[n] - plain[n]).norm() ** 2 for n in got) ** 0.5 / sum(g.norm() ** 2 for g in got.values()) ** 0.5
    assert share > 0.1, share
    uninstall()
    assert HybridModel.forward is original
    assert torch.equal(gradients(model, tokens, labels)[0], plain_loss)


def compute_in_postprocess(model) -> None:
    """Call a `_postprocess` of the class past its `forward`, as the schedule plan of Megatron's request 4942 does."""

    def postprocess(model, hidden_states, labels, loss_mask, packed_seq_params, inference_context):
        return model.compute_language_model_loss(labels, model.output_layer(hidden_states)[0])

    def plan(tokens, positions, mask, labels):
        states = model.decoder(hidden_states=model.embedding(tokens, positions), attention_mask=mask)
        return model._postprocess(states, labels, None, None, None)

    type(model)._postprocess, model.forward = postprocess, plan


def main() -> None:
    cpu_backend.activate()
    start()
    model = build_model()
    check(model, "cpu")
    if not hasattr(model, "_postprocess"):
        compute_in_postprocess(model)
        check(model, "cpu")
    print("hybrid script: all as expected")


if __name__ == "__main__":
    main()
