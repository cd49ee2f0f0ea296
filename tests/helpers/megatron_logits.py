# SPDX-License-Identifier: Apache-2.0
"""Logits of Megatron's own GPTModel, built from the arguments of a checkpoint of one CPU rank."""

from pathlib import Path

import torch
from torch import Tensor

TOLERANCE = 1e-4  # of the logits' standard deviation: what fp32 makes of two orders of the same sums


def megatron_logits(checkpoint: Path, tokens: Tensor) -> Tensor:
    """Compute logits [b, n, rows] for tokens [b, n]; needs the CPU backend and no process group."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import GPTModelBuilder

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    config = gpt_config_from_args(dist_checkpointing.load_common_state_dict(str(checkpoint))["args"])
    config.parallel_output = False
    model = GPTModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups()).eval()
    asked = {name: part for name, part in model.sharded_state_dict().items() if not isinstance(part, ShardedObject)}
    model.load_state_dict(dist_checkpointing.load(asked, str(checkpoint)), strict=False)
    length = tokens.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)  # True where attention must not look
    with torch.no_grad():
        return torch.cat([model(row[None], torch.arange(length)[None], mask).float() for row in tokens])


def compare(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """Return the largest difference of two logits and the standard deviation of `ours`, without padding."""
    ours = ours[..., : theirs.shape[-1]]
    return (ours - theirs).abs().max().item(), ours.std().item()
