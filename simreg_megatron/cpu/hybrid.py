# SPDX-License-Identifier: Apache-2.0
"""Attention and MLP layers of plain torch for Megatron's HybridModel, whose own are Transformer Engine's.

`--spec simreg_megatron.cpu.hybrid LOCAL` chooses them, as the launch scripts do without Transformer Engine.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules


class LocalStack(HybridStack):
    """HybridStack with torch's norm at its end."""

    def __init__(self, config: Any, submodules: Any, *args: Any, post_layer_norm: bool = True, **kwargs: Any) -> None:
        super().__init__(config, submodules, *args, post_layer_norm=False, **kwargs)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = WrappedTorchNorm(config, config.hidden_size, config.layernorm_epsilon)


class OtherLayer:
    """A layer that is not here; Megatron's default would pass on its input."""

    def __init__(self, *_: Any, layer_number: int, **__: Any) -> None:
        raise NotImplementedError(
            f"layer {layer_number} of --hybrid-layer-pattern is neither attention (*) nor MLP (-), and other layers "
            "need Transformer Engine, Mamba's (M) mamba-ssm too: install them, or give a pattern of * and -"
        )


_GPT = get_gpt_layer_local_spec(normalization="RMSNorm").submodules  # whose norm follows --normalization
LOCAL = ModuleSpec(
    module=LocalStack,
    submodules=HybridStackSubmodules(
        attention_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=_GPT.input_layernorm,
                self_attention=_GPT.self_attention,
                self_attn_bda=_GPT.self_attn_bda,
            ),
        ),
        mlp_layer=ModuleSpec(
            module=MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=_GPT.pre_mlp_layernorm, mlp=_GPT.mlp, mlp_bda=_GPT.mlp_bda
            ),
        ),
        **dict.fromkeys(("mamba_layer", "gdn_layer", "dsa_layer", "mla_layer", "moe_layer"), OtherLayer),
    ),
)
