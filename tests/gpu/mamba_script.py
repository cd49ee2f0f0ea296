# SPDX-License-Identifier: Apache-2.0
"""One process on one GPU: Megatron's own hybrid stack of Mamba, attention and MLP layers, with and without SimReg."""

import torch

from tests.megatron.hybrid_script import check
from tests.megatron.own_script import LENGTH, VOCABULARY, start


def build_model():
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=3, hidden_size=256, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0,
        gradient_accumulation_fusion=False, is_hybrid_model=True,
    )  # fmt: skip
    return HybridModel(config, hybrid_stack_spec, VOCABULARY, LENGTH, hybrid_layer_pattern="M*-").cuda().train()


def main() -> None:
    torch.cuda.set_device(0)
    start()
    check(build_model(), "cuda")
    print("mamba script: all as expected")


if __name__ == "__main__":
    main()
