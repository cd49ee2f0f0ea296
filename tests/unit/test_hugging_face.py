# SPDX-License-Identifier: Apache-2.0
"""The function of docs/ecosystem.md adds SimReg to transformers' own loss, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from simreg_megatron.losses import simreg_loss
from tests.helpers.pages import ROOT, blocks

transformers = pytest.importorskip("transformers")


@pytest.fixture
def names() -> dict[str, Any]:
    """Run the page's code up to the training, and return its names."""
    (block,) = [
        block
        for block in blocks(ROOT / "docs/ecosystem.md")
        if block.language == "python" and "TrainingArguments" in block.text
    ]
    found: dict[str, Any] = {}
    exec(block.text.split("text = ")[0], found)
    return found


def gradient(model: Any, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return model.model.layers[0].mlp.up_proj.weight.grad.clone()


@pytest.mark.parametrize("count", [None, 100])
def test_it_is_their_loss_and_ours(names: dict[str, Any], count: int | None) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        output_hidden_states=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(0, 11, (3, 20))
    labels = tokens.clone()
    labels[1, 7:] = -100
    with_simreg: Callable[..., torch.Tensor] = names["loss_with_simreg"]
    found = gradient(model, with_simreg(model(tokens), labels, count))
    num_labels = (labels[:, 1:] >= 0).sum()
    share = 1 if count is None else num_labels / count
    outputs = model(tokens, labels=labels)
    norm = []
    model.model.norm.register_forward_hook(lambda module, given, result: norm.append(result))
    model(tokens)
    simreg = simreg_loss(norm[0][:, :-1], labels[:, 1:], reduction="sum") / num_labels
    assert simreg > 0.1
    torch.testing.assert_close(found, gradient(model, (outputs.loss + names["LAMBDA"] * simreg) * share))
    own = with_simreg(model(tokens), labels, count)
    torch.testing.assert_close(own, (outputs.loss + names["LAMBDA"] * simreg) * share)
    assert not torch.isclose(own, outputs.loss * share), "the term is seen"
