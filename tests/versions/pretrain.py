# SPDX-License-Identifier: Apache-2.0
"""A pretraining script for the wheels that carry `megatron.training` (0.17 on): the tiny model, its weights, its text.

Only `pretrain` itself differs from release to release. SIMREG_VERSIONS_INPUT names the file of tests.versions.inputs.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.arguments import core_transformer_config_from_args
from torch import Tensor

from tests.versions import tiny

_GIVEN = torch.load(os.environ["SIMREG_VERSIONS_INPUT"], weights_only=True)


class _Text(torch.utils.data.Dataset):
    """Sequences in the order of the file, again from the first after the last."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.rows = list(zip(_GIVEN["tokens"].flatten(0, 1), _GIVEN["mask"].flatten(0, 1), strict=True))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens, mask = self.rows[index % len(self.rows)]
        return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": mask}


def datasets(num_samples: Any, vp_stage: int | None = None) -> tuple[Any, None, None]:
    return _Text(int(num_samples[0])), None, None


datasets.is_distributed = True  # type: ignore[attr-defined]  # every rank reads, nothing is broadcast


def model(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, **_: Any) -> Any:
    from megatron.training import get_args

    config = core_transformer_config_from_args(get_args())
    chunk = tiny.build_chunk(config, _GIVEN["vocabulary"], (pre_process, post_process), vp_stage)
    tiny.load([chunk], _GIVEN["weights"])
    return chunk


def forward_step(data_iterator: Any, chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
    batch = next(data_iterator)
    return tiny.forward(chunk, batch["tokens"], batch["labels"], batch["loss_mask"], name="lm loss")


def main() -> None:
    kind = ModelType.encoder_or_decoder
    names = list(inspect.signature(pretrain).parameters)
    if names[0] != "cfg_container":
        pretrain(datasets, model, kind, forward_step)
        return
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    settings = pretrain_cfg_container_from_args(parse_and_validate_args())
    pretrain(
        settings,
        train_valid_test_dataset_provider=datasets,
        model_provider=model,
        model_type=kind,
        forward_step_func=forward_step,
    )


if __name__ == "__main__":
    main()
