# SPDX-License-Identifier: Apache-2.0
"""Multimodal models, which mask the loss of the language model inside: tiny ones of Megatron's LLaVA and MIMO."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from simreg_megatron import install, loop, uninstall
from simreg_megatron.cpu import backend as cpu_backend
from simreg_megatron.losses import simreg_loss
from tests.megatron.own_script import CONFIG, LENGTH, VOCABULARY, build_model, positions_of, start

IMAGE = -200  # LLaVA's token for it, which becomes 4 positions


def build_llava(config: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.multimodal.llava_model import LLaVAModel
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules

    config.language_model_type, config.vision_model_type = "gpt", "internvit"
    model = LLaVAModel(
        config, get_gpt_layer_local_spec(), VOCABULARY, 2 * LENGTH, config,
        get_vit_layer_with_local_spec(), True, config,
        MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear), img_h=28, img_w=28,
    )  # fmt: skip
    return model.train()


def build_mimo(config: Any) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.mimo.config.base_configs import MimoModelConfig
    from megatron.core.models.mimo.model.base import MimoModel
    from megatron.core.transformer.spec_utils import ModuleSpec

    given = {"vocab_size": VOCABULARY, "max_sequence_length": LENGTH, "config": config}
    inner = ModuleSpec(module=GPTModel, params={"transformer_layer_spec": get_gpt_layer_local_spec(), **given})
    return MimoModel(MimoModelConfig(inner)).train()


def gradients(model: Any, run: Callable[[], tuple[Any, Any]], term: Callable[..., Any]) -> tuple[Any, dict[str, Any]]:
    """The masked mean of the loss and its gradient, with `term` of the last states and the mask added."""
    caught: list[torch.Tensor] = []
    hook = model.language_model.decoder.register_forward_hook(lambda module, inputs, output: caught.append(output))
    model.zero_grad()
    losses, mask = run()
    hook.remove()
    loss = (losses * mask).sum() / mask.sum()
    (loss + term(caught[0].transpose(0, 1), mask)).backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check(model: Any, run: Callable[[], tuple[Any, Any]], labels: torch.Tensor) -> None:
    """The gradient is the written-out sum's over the tokens that the loss mask keeps."""

    def term(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return 2 * simreg_loss(states, labels, temperature=0.5, chunk_size=12, valid=mask > 0)

    plain, _ = gradients(model, run, lambda *_: 0)
    _, wanted = gradients(model, run, term)
    install(config=CONFIG, models=[model])
    tokens = labels[:, :LENGTH].clamp(min=0)
    with pytest.raises(NotImplementedError, match="inside a multimodal model and is given no loss mask"):
        model.language_model(tokens, positions_of(tokens), None, labels=tokens)
    loss, got = gradients(model, run, lambda *_: 0)
    assert torch.equal(loss, plain), "the value is the language-model loss"
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-7, msg=name)
    assert float(loop.end_step([model], reduces=True)["simreg loss"]) > 0
    uninstall()


def main() -> None:
    cpu_backend.activate()
    start()
    random = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, 8, (2, LENGTH + 1), generator=random)
    mask = (torch.rand(2, LENGTH, generator=random) < 0.7).float()
    tokens[0, 0], tokens[1, 9] = IMAGE, IMAGE
    llava, images = build_llava(build_model().config), torch.randn(2, 3, 28, 28, generator=random)
    merged = torch.full((2, LENGTH + 3), -100)  # one image of 4 positions in each row, whose last one has a label
    merged[0, 3:], merged[1, :8], merged[1, 12:] = tokens[0, 1:], tokens[1, 1:9], tokens[1, 10:]
    tokens, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    tiles, places = torch.ones(2).int(), positions_of(tokens)
    check(llava, lambda: llava(images, tokens, places, None, labels, mask, num_image_tiles=tiles), merged)
    mimo, texts, targets = build_mimo(build_model().config), tokens.clamp(min=0), labels.clamp(min=0)
    check(mimo, lambda: mimo(texts, places, None, mask, targets), targets)
    print("llava script: all as expected")
