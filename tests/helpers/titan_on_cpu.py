# SPDX-License-Identifier: Apache-2.0
"""torchtitan's own trainer on a CPU: `python -m tests.helpers.titan_on_cpu LAMBDA PORT TOKENIZER RANK RANKS KIND`.

What torchtitan takes from a GPU (names, memory, FlexAttention's backward) and its text are stand-ins. Two micro-batches
a step, the same in every layout, and weights that follow from their names.
"""

import importlib
import itertools
import os
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

TOKENS = 256
DEGREES = {  # of two ranks
    "one": {},
    "fsdp": {"data_parallel_shard_degree": 2},
    "replicate": {"data_parallel_shard_degree": 1, "data_parallel_replicate_degree": 2},
    "pipeline": {"data_parallel_shard_degree": 1, "pipeline_parallel_degree": 2},
}


class _Cpu(ModuleType):
    """torch.cpu with the functions of torch.cuda that torchtitan calls."""

    get_device_name = staticmethod(lambda *_: "CPU")
    get_device_properties = staticmethod(lambda *_: SimpleNamespace(name="CPU", total_memory=1 << 34))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name, lambda *_, **__: {})


def _attention(query: Any, key: Any, value: Any, *, block_mask: Any, scale: Any, enable_gqa: bool, **_: Any) -> Any:
    from torch.nn.attention.flex_attention import AuxOutput, create_mask

    mask = create_mask(block_mask.mask_mod, 1, 1, query.shape[2], key.shape[2], device="cpu")
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa), AuxOutput()


def _fill(model: torch.nn.Module) -> None:
    """Give each parameter numbers of its own, and gloo a reduction that it knows."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    for name, weight in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        full = 0.05 * torch.randn(weight.shape, generator=generator) + (weight.dim() == 1)
        own = distribute_tensor(full, weight.device_mesh, weight.placements) if isinstance(weight, DTensor) else full
        weight.data.copy_(own)


def main() -> None:
    weight, port, tokenizer, rank, ranks, kind = sys.argv[1:]
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "localhost"}
    os.environ["MASTER_PORT"] = port
    stride, first = (2, int(rank)) if kind in ("fsdp", "replicate") else (1, 0)
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", _Cpu("cpu")
    utils.get_local_device = lambda: torch.device("cpu")
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel
    from torchtitan.tools.logging import init_logger

    from simreg_megatron.loop.titan import SimRegLoss

    config = llama3_debugmodel()
    training, has_rows = config.training, hasattr(config.training, "seq_len")  # release 0.3; later ones have tokens
    place = "dataloader" if has_rows else "data.loader"
    BaseDataLoader = importlib.import_module(f"torchtitan.components.{place}").BaseDataLoader
    init_logger()
    dist_utils.set_pg_timeouts = lambda *_, **__: None
    FlexAttention._compiled_flex_attn = staticmethod(_attention)

    class Loader(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Config, **_: Any) -> None:
            pass

        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            generator = torch.Generator().manual_seed(1)
            for number in itertools.count():
                tokens = torch.randint(0, 50, (TOKENS + 1,), generator=generator)
                positions = torch.arange(TOKENS) % 100
                if has_rows:
                    tokens, positions = tokens[None], positions[None]
                if number % stride == first:
                    yield {"input": tokens[..., :-1], "positions": positions}, tokens[..., 1:]

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    ours = {"simreg_lambda": float(weight), "simreg_chunk_size": 64, "simreg_temperature": 0.5}
    config.loss = SimRegLoss.Config(loss_fn=config.loss.loss_fn, **ours)
    config.dataloader = Loader.Config()
    config.hf_assets_path = tokenizer
    training.steps, training.disable_cuda_graphs, training.mixed_precision_param = 4, True, "float32"
    pieces = 2 if kind == "pipeline" else 1
    if has_rows:
        training.local_batch_size, training.seq_len, training.global_batch_size = pieces, TOKENS, 2
    else:
        training.num_tokens_per_microbatch_per_dp_rank, training.max_context_length = TOKENS, 128
        training.num_tokens_per_train_step = 2 * TOKENS
        config.parallelism.num_pp_microbatches = pieces
    for name, degree in DEGREES[kind].items():
        setattr(config.parallelism, name, degree)
    config.validator.enable, config.checkpoint.enable, config.debug.seed = False, False, 1
    trainer = config.build()
    for model in trainer.model_parts:
        _fill(model)
    trainer.train()
    trainer.close()


if __name__ == "__main__":
    main()
