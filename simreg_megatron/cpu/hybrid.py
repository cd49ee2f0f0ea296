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
    """HybridStack with torch's norm at its end; it refuses layers that are not here, which Megatron would leave out."""

    def __init__(self, config: Any, submodules: Any, *, layer_type_list: list[str], **options: Any) -> None:
        if other := set(layer_type_list) - set("*-"):
            raise NotImplementedError(
                f"--hybrid-layer-pattern has layers {' '.join(sorted(other))}, and without Transformer Engine (Mamba's "
                "M needs mamba-ssm, too) there are attention (*) and MLP (-) alone: install them, or give these two"
            )
        super().__init__(config, submodules, layer_type_list=layer_type_list, post_layer_norm=False, **options)
        self.post_layer_norm = True
        if self.post_process:
            self.final_norm = WrappedTorchNorm(config, config.hidden_size, config.layernorm_epsilon)


def _of_gpt(*names: str) -> TransformerLayerSubmodules:
    """Return these parts of GPTModel's layer, whose norm follows --normalization."""
    layer = get_gpt_layer_local_spec(normalization="RMSNorm").submodules
    return TransformerLayerSubmodules(**{name: getattr(layer, name) for name in names})


_ATTENTION = ModuleSpec(TransformerLayer, submodules=_of_gpt("input_layernorm", "self_attention", "self_attn_bda"))
_MLP = ModuleSpec(MLPLayer, submodules=_of_gpt("pre_mlp_layernorm", "mlp", "mlp_bda"))
LOCAL = ModuleSpec(LocalStack, submodules=HybridStackSubmodules(attention_layer=_ATTENTION, mlp_layer=_MLP))
