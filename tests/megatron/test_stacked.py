# SPDX-License-Identifier: Apache-2.0
"""A model of a stack follows Megatron's own loop with the plugin: same weights, same order of data, 20 steps."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from research.stacked import Data, Run, Shape, Stack, sequences
from simreg_megatron.tools.builtin_corpus import BuiltinCorpus
from tests.helpers.quick import quick
from tests.megatron import runs
from tests.megatron.parameters import named_parameters
from tests.megatron.text import VOCABULARY

STEPS, SHAPE = 20, Shape(width=64, layers=2, sequence=64, batch=2, vocabulary=VOCABULARY)
FLAGS = (
    "--num-attention-heads", "2", "--ffn-hidden-size", "176", "--global-batch-size", "2", "--eval-iters", "0",
    "--train-iters", "20", "--lr", "4e-3", "--min-lr", "4e-4", "--lr-decay-style", "cosine", "--lr-warmup-iters", "4",
    "--weight-decay", "0.1", "--adam-beta2", "0.95",
)  # fmt: skip
CLOSE = 5e-6  # relative, of the loss of any step


def planted() -> None:
    """Replace the weights and the data of a run by those that the test has saved."""
    from megatron.core.rerun_state_machine import RerunDataIterator
    from megatron.training import training

    start = torch.load(Path(os.environ["RECORD_OUT"]).parent / "start.pt")
    batches, train_step = RerunDataIterator(_batches(start["tokens"])), training.train_step

    def planted_step(forward: Any, data: Any, models: Any, *args: Any, **kwargs: Any) -> Any:
        for name, parameter in named_parameters(models) if start["weights"] else ():
            parameter.data.copy_(start["weights"].pop(name))
        return train_step(forward, batches, models, *args, **kwargs)

    training.train_step = planted_step


def _batches(tokens: Tensor) -> Iterator[dict[str, Tensor]]:
    for each in tokens:
        ids, mask = each[:, :-1], torch.ones(SHAPE.sequence, SHAPE.sequence).tril() < 0.5
        fixed = {"position_ids": torch.arange(SHAPE.sequence).expand_as(ids), "loss_mask": torch.ones(ids.shape)}
        yield {"tokens": ids, "labels": each[:, 1:].contiguous(), "attention_mask": mask[None, None], **fixed}


def named_as_in_megatron(stack: Stack, k: int) -> dict[str, Tensor]:
    own = {name: weight[k].detach().clone() for name, weight in stack.weights.items()}
    found = {"embedding.word_embeddings.weight": own["embedding"], "output_layer.weight": own["head"]}
    for i in range(SHAPE.layers):
        by_head = own[f"qkv{i}"].view(SHAPE.width, 3, -1, SHAPE.head).transpose(1, 2).reshape(SHAPE.width, -1)
        parts = {
            "self_attention.linear_qkv": by_head.T, "self_attention.linear_proj": own[f"o{i}"].T,
            "mlp.linear_fc1": own[f"up{i}"].T, "mlp.linear_fc2": own[f"down{i}"].T,
            "input_layernorm": own["norms"][2 * i], "pre_mlp_layernorm": own["norms"][2 * i + 1],
        }  # fmt: skip
        found |= {f"decoder.layers.{i}.{name}.weight": part.contiguous() for name, part in parts.items()}
    return found | {"decoder.final_layernorm.weight": own["norms"][-1]}


@pytest.mark.parametrize("lam", quick([0.0, 3.0], bool))
def test_a_stack_is_megatron_with_the_plugin(lam: float, text: BuiltinCorpus, data_flags, tmp_path: Path) -> None:
    other = Run(seed=1, lr=1e-3, std=0.1, warm=0.05, lam=1.0, chunk=16, labels="permuted")
    data, run = Data.of(text.train_prefix.parent, "cpu"), Run(5, 4e-3, 0.02, 0.2, lam, 32 if lam else 0, "right")
    stack = Stack(SHAPE, [other, run], STEPS, data)
    tokens = sequences(data.train, stack.order[:, 1], SHAPE.sequence)
    torch.save({"tokens": tokens, "weights": named_as_in_megatron(stack, 1)}, tmp_path / "start.pt")
    losses = torch.stack([stack.step(step)[1] for step in range(STEPS)])

    def apart(*flags: str) -> float:
        out = tmp_path / "-".join(("run", *flags))
        found = runs.train(out, (*data_flags, *FLAGS, *flags), patch="test_stacked:planted")
        return (torch.tensor(found.losses) / losses - 1).abs().max().item()

    on = ("--simreg-lambda", "3")
    assert (apart(*on, "--simreg-chunk-size", "32") if lam else apart()) < CLOSE
    assert (apart(*on, "--simreg-chunk-size", "16") if lam else apart("--lr-warmup-iters", "3")) > 1000 * CLOSE
