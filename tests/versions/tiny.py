# SPDX-License-Identifier: Apache-2.0
"""A tiny GPT on megatron-core alone, of any release: its model, its plain weights, a step of Megatron's schedule.

Shapes: M micro-batches, B sequences each, S tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PREFIX = "simreg_"  # of the scalars that SimReg adds to a model
LAYERS, WIDTH, HEADS, LENGTH = 4, 64, 4, 64
MICRO_BATCHES, MICRO_BATCH = 4, 2


@dataclass(frozen=True)
class Layout:
    """How many ranks share the model, and in what way."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1  # chunks of the model on each pipeline stage

    @property
    def processes(self) -> int:
        return self.tensor * self.pipeline

    @property
    def schedule(self) -> str:
        """The function of Megatron's that has to drive it."""
        if self.pipeline == 1:
            return "forward_backward_no_pipelining"
        return f"forward_backward_pipelining_{'with' if self.virtual > 1 else 'without'}_interleaving"


LAYOUTS = {
    "one process": Layout(),
    "TP 2 + SP": Layout(tensor=2),
    "PP 2": Layout(pipeline=2),
    "PP 2 x VPP 2": Layout(pipeline=2, virtual=2),
}


def start(layout: Layout) -> None:
    """Megatron's process groups for this layout; those of an earlier one are forgotten."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    parallel_state.destroy_model_parallel()
    parallel_state._POSITION_EMBEDDING_GLOBAL_RANKS = None  # 0.12 forgets the group but not its ranks
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
    )
    model_parallel_cuda_manual_seed(1)


def model_config(layout: Layout, *, per_token: bool) -> Any:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=LAYERS, hidden_size=WIDTH, ffn_hidden_size=2 * WIDTH, num_attention_heads=HEADS,
        normalization="RMSNorm", gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True,
        masked_softmax_fusion=False, gradient_accumulation_fusion=False, bias_activation_fusion=False,
        bias_dropout_fusion=False, apply_rope_fusion=False, persist_layer_norm=False,
        tensor_model_parallel_size=layout.tensor, sequence_parallel=layout.tensor > 1,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        pipeline_dtype=torch.float32,
        # Two stages exchange both directions with one another: batched messages of interleaved chunks get mixed up.
        overlap_p2p_comm=layout.virtual > 1,
        batch_p2p_comm=layout.virtual == 1,
        calculate_per_token_loss=per_token,
        finalize_model_grads_func=finalize_model_grads,
    )  # fmt: skip


def build(layout: Layout, vocabulary: int, *, per_token: bool) -> list[Any]:
    """The chunks of the model on this rank, each in Megatron's DistributedDataParallel."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = model_config(layout, per_token=per_token)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    chunks = []
    for virtual in range(layout.virtual):
        if layout.virtual > 1:
            parallel_state.set_virtual_pipeline_model_parallel_rank(virtual)
        ends = (stage == virtual == 0, stage == layout.pipeline - 1 and virtual == layout.virtual - 1)
        chunk = build_chunk(config, vocabulary, ends, virtual if layout.virtual > 1 else None)
        chunks.append(DistributedDataParallel(config, DistributedDataParallelConfig(), chunk.train()))
    return chunks


def build_chunk(config: Any, vocabulary: int, ends: tuple[bool, bool], virtual: int | None) -> Any:
    """One chunk; `ends` says whether it is the first and whether it is the last of the model."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    options = dict(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=vocabulary,
        max_sequence_length=LENGTH,
        pre_process=ends[0],
        post_process=ends[1],
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    if "vp_stage" in inspect.signature(GPTModel).parameters:  # before 0.13 only a global variable holds the chunk
        options["vp_stage"] = virtual
    return GPTModel(**options)


def named_parameters(chunks: list[Any]) -> Iterator[tuple[str, Any]]:
    """(name, parameter) of all chunks of this rank, wrapped or not; layers are counted over the whole model."""
    for chunk in (getattr(chunk, "module", chunk) for chunk in chunks):
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        for name, parameter in chunk.named_parameters():
            if name.startswith("decoder.layers."):
                local, _, rest = name.removeprefix("decoder.layers.").partition(".")
                name = f"decoder.layers.{numbers[int(local)]}.{rest}"
            yield name, parameter


Shard = tuple[int, int, int]  # dimension that is cut (-1: whole), which part, of how many


def shard_of(parameter: Any) -> Shard:
    from megatron.core import parallel_state

    size = parallel_state.get_tensor_model_parallel_world_size()
    if size == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return -1, 0, 1
    return parameter.partition_dim, parallel_state.get_tensor_model_parallel_rank(), size


def part(whole: Tensor, name: str, shard: Shard) -> Tensor:
    """This rank's part of a parameter; the two halves of a gated layer are each cut by themselves."""
    dimension, index, count = shard
    if count == 1:
        return whole
    halves = whole.chunk(2, dim=dimension) if "linear_fc1" in name else (whole,)
    return torch.cat([half.chunk(count, dim=dimension)[index] for half in halves], dim=dimension)


def whole(parts: Mapping[int, Tensor], name: str, shard: Shard) -> Tensor:
    """`part` undone, from the parts of all ranks."""
    dimension, _, count = shard
    ordered = [parts[index] for index in range(count)]
    if count == 1:
        return ordered[0]
    if "linear_fc1" in name:
        gates, values = zip(*(piece.chunk(2, dim=dimension) for piece in ordered), strict=True)
        return torch.cat([*gates, *values], dim=dimension)
    return torch.cat(ordered, dim=dimension)


@torch.no_grad()
def load(chunks: list[Any], weights: Mapping[str, Tensor]) -> None:
    """Give every parameter its part of the plain weights; scalars that SimReg trains stay where they start."""
    for name, parameter in named_parameters(chunks):
        if not name.startswith(PREFIX):
            parameter.copy_(part(weights[name], name, shard_of(parameter)))


def step(chunks: list[Any], layout: Layout, tokens: Tensor, mask: Tensor) -> list[float]:
    """Forward and backward of one global batch by Megatron's own schedule; gradients lie in `main_grad` after it.

    Tokens [M, B, S + 1] and mask [M, B, S] give the mean loss of each micro-batch, on the last stage alone.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for chunk in chunks:
        chunk.zero_grad_buffer()
    schedule = get_forward_backward_func()
    assert schedule.__name__ == layout.schedule
    reports = schedule(
        forward_step_func=_forward_step,
        data_iterator=[zip(tokens, mask, strict=True) for _ in chunks],
        model=chunks,
        num_microbatches=len(tokens),
        seq_length=LENGTH,
        micro_batch_size=MICRO_BATCH,
        forward_only=False,
    )
    return [(report["loss"][0] / report["loss"][1]).item() for report in reports]


def _forward_step(data_iterator: Iterator[tuple[Tensor, Tensor]], model: Any) -> tuple[Tensor, Callable[..., Any]]:
    tokens, mask = next(data_iterator)
    return forward(model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask, name="loss")


def forward(
    model: Any, tokens: Tensor, labels: Tensor, mask: Tensor, *, name: str
) -> tuple[Tensor, Callable[..., Any]]:
    """Make a forward step for Megatron: the model's output, and the function that makes a loss of it."""
    positions = torch.arange(LENGTH).expand_as(labels)
    future = torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None]
    output = model(tokens, positions, future, labels=labels, loss_mask=mask)

    def loss_of(per_token: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total, count = (per_token.float() * mask).sum(), mask.sum().to(torch.int)
        return total, count, {name: torch.stack([total.detach(), count.float()])}

    return output, loss_of


def gradients(chunks: list[Any]) -> dict[str, Tensor]:
    return {name: parameter.main_grad.clone() for name, parameter in named_parameters(chunks)}


def make_weights(vocabulary: int) -> dict[str, Tensor]:
    """Plain weights of the whole model, made by the release that is installed."""
    torch.manual_seed(0)
    chunks = build(Layout(), vocabulary, per_token=False)
    return {name: parameter.detach().clone() for name, parameter in named_parameters(chunks)}
