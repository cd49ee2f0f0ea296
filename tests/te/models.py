# SPDX-License-Identifier: Apache-2.0
"""Models of Transformer Engine's layers on ranks over gloo: built, saved and loaded by Megatron, never run.

Every weight is a function of its name in the checkpoint, so that any layout holds parts of the same whole tensors.
"""

import multiprocessing
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.megatron import forks

LAYERS, HIDDEN, HEADS, GROUPS, FFN, EXPERTS, VOCABULARY = 2, 64, 4, 2, 96, 4, 512
ITERATION = 3
_BASE = (
    "--num-layers", str(LAYERS), "--hidden-size", str(HIDDEN), "--num-attention-heads", str(HEADS),
    "--group-query-attention", "--num-query-groups", str(GROUPS), "--ffn-hidden-size", str(FFN),
    "--seq-length", "32", "--max-position-embeddings", "32", "--micro-batch-size", "1", "--global-batch-size", "4",
    "--normalization", "RMSNorm", "--swiglu", "--position-embedding-type", "rope", "--disable-bias-linear",
    "--untie-embeddings-and-output-weights", "--use-cpu-initialization", "--lr", "1e-3", "--train-iters", "2",
    "--transformer-impl", "transformer_engine", "--distributed-backend", "gloo", "--no-gradient-accumulation-fusion",
    "--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCABULARY),
)  # fmt: skip
# The other dispatcher makes a CUDA stream when it is built.
_EXPERTS = ("--num-experts", str(EXPERTS), "--moe-router-topk", "2", "--moe-token-dispatcher-type", "allgather")
MODELS = {"dense": (), "sequential": _EXPERTS, "grouped": (*_EXPERTS, "--moe-grouped-gemm")}
LAYOUTS = {
    "tp2": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "pp2": ("--pipeline-model-parallel-size", "2"),
    "ep2": ("--expert-model-parallel-size", "2"),
}
SCALARS = {"simreg_similarity.query", "simreg_similarity.key"}
EXPERT_LAYERS = {"dense": set(), "sequential": {"SequentialMLP"}, "grouped": {"TEGroupedMLP"}}


def whole(key: str, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(key.encode())))


def save(folder: Path, model: str, layout: str, log: Path) -> Path:
    _on_two_ranks(_save, log, folder, model, layout)
    return folder


def load(folder: Path, model: str, layout: str, log: Path) -> None:
    """Two ranks read the checkpoint into a model of zeros; every weight must be what `whole` says."""
    _on_two_ranks(_load, log, folder, model, layout)


def _on_two_ranks(target: Any, log: Path, *arguments: Any) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.te.preload"])
    status = forks.run_ranks(target, *arguments, processes=2, log=log, timeout=400, context=context)
    assert status == 0, log.read_text()[-4000:]


def _save(folder: Path, name: str, layout: str) -> None:
    from megatron.core import dist_checkpointing
    from megatron.training.checkpointing import generate_state_dict

    args, model = _build(name, layout, "learnable")
    _look_at(model, name)
    for tensor in _tensors(model):
        tensor.data.detach().copy_(_part(tensor, whole(tensor.key, tensor.global_shape)))
    forks.quick_save()
    place = folder / f"iter_{ITERATION:07d}"
    place.mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save(generate_state_dict(args, [model], None, None, None, iteration=ITERATION), place)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))


def _load(folder: Path, name: str, layout: str) -> None:
    from megatron.core import dist_checkpointing

    _, model = _build(name, layout, "cosine")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    found = dist_checkpointing.load({"model": model.sharded_state_dict()}, folder / "release")
    model.load_state_dict(found["model"])
    for tensor in _tensors(model):
        assert torch.equal(tensor.data, _part(tensor, whole(tensor.key, tensor.global_shape))), tensor.key


def _build(name: str, layout: str, similarity: str) -> tuple[Any, Any]:
    """Megatron's own flags, parser and builder; SimReg is installed before, as in a run."""
    from simreg_megatron import SimRegConfig, install

    install(config=SimRegConfig(lambda_=1, similarity=similarity))
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.models.gpt import GPTModelBuilder

    sys.argv = ["pretrain", *_BASE, *MODELS[name], *LAYOUTS[layout]]
    args = parse_args()
    validate_args(args)
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
    )
    config = gpt_config_from_args(args)
    config.vocab_size, config.should_pad_vocab = VOCABULARY, False
    groups = ProcessGroupCollection.use_mpu_process_groups()
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    return args, GPTModelBuilder(config).build_model(groups, pre_process=first, post_process=last)


def _look_at(model: Any, name: str) -> None:
    """The layers are Transformer Engine's real ones, and the stage that has the loss has the scalars."""
    from megatron.core.extensions import transformer_engine as extensions
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    assert extensions.HAVE_TE
    linear = model.decoder.layers[0].self_attention.linear_qkv
    assert isinstance(linear, TransformerEngineBaseModule)
    assert type(linear).__name__ == "TELayerNormColumnParallelLinear"
    kinds = {type(module).__name__ for module in model.modules()}
    assert kinds & {"SequentialMLP", "TEGroupedMLP", "GroupedMLP"} == EXPERT_LAYERS[name]
    scalars = {key for key, _ in model.named_parameters() if key.startswith("simreg_")}
    assert scalars == (SCALARS if model.post_process else set())


def _tensors(model: Any) -> Iterator[Any]:
    """Megatron's ShardedTensors, each with its name, the shape of the whole and this rank's part of it."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import apply_factories

    sharded = model.sharded_state_dict()
    apply_factories(sharded)
    yield from (value for value in nested_values(sharded) if isinstance(value, ShardedTensor))


def _part(tensor: Any, of: Tensor) -> Tensor:
    return of[tensor.global_slice()].reshape(tensor.data.shape)
