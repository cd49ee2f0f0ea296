# SPDX-License-Identifier: Apache-2.0
"""A HybridModel, which computes its loss inside `forward`: attention and MLP layers of plain torch in a hybrid stack.

Mamba layers need kernels of a GPU; SimReg meets them no differently, for it looks at what the whole stack returns.
"""

import torch

from simreg_megatron.cpu import backend as cpu_backend
from tests.megatron import own_script
from tests.megatron.own_script import LENGTH, VOCABULARY, WIDTH, start


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


def check(model, device: str) -> None:
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    own_script.check(model, HybridModel, "forward", device)


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
