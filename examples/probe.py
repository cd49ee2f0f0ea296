# SPDX-License-Identifier: Apache-2.0
"""Final hidden states of one validation text under a saved model: what the cosine heat-maps are drawn from.

`torchrun -m simreg_megatron examples/probe.py [the run's flags] --load CHECKPOINTS --probe-output OUT.npz`, on
one process. The file holds hidden [n, d] float32, labels [n] (the ids of the next tokens) and tokens [n] as text;
`--probe-steps 50,400` writes one file for each of these checkpoints, OUT-50.npz and OUT-400.npz.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.checkpointing import load_checkpoint
from megatron.training.initialize import initialize_megatron
from megatron.training.training import setup_model_and_optimizer

from simreg_megatron.plugin import compat
from simreg_megatron.pretrain import datasets_provider
from simreg_megatron.tools.checkpoints import TRACKER


def add_probe_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group(title="probe")
    group.add_argument("--probe-output", type=Path, required=True, help="the .npz file to write")
    group.add_argument(
        "--probe-steps",
        type=lambda text: [int(word) for word in text.split(",")],
        default=(),
        help="of these checkpoints, such as 50,400 (default: the newest)",
    )
    return parser


@torch.no_grad()
def hidden_states(model: Any, sample: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return what enters the output layer for the tokens of one dataset sample, [n, d] float32."""
    caught: list[torch.Tensor] = []
    hook = model.decoder.register_forward_hook(lambda module, inputs, output: caught.append(output))
    mask = sample.get("attention_mask")
    model.eval()(
        sample["tokens"][None].cuda(), sample["position_ids"][None].cuda(), None if mask is None else mask[None].cuda()
    )
    hook.remove()
    return caught[0][:, 0].float().cpu()


def main() -> None:
    args = parse_and_validate_args(add_probe_arguments, args_defaults={"tokenizer_type": "HuggingFaceTokenizer"})
    if args.load is None:
        raise SystemExit("error: the probe reads a checkpoint: give --load CHECKPOINTS, what the run had as --save")
    args.exit_on_missing_checkpoint = True  # never the states of a model that nothing has trained
    needed = [TRACKER, *(f"iter_{step:07d}" for step in args.probe_steps)]
    if missing := [name for name in needed if not Path(args.load, name).exists()]:
        raise SystemExit(f"error: {args.load} has no {missing[0]}: give --load CHECKPOINTS, what the run had as --save")
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    initialize_megatron()
    if torch.distributed.get_world_size() > 1:
        raise SystemExit("error: the probe reads one model in one process: start it with --nproc-per-node 1")
    chunks, _, _ = setup_model_and_optimizer(
        ModelType.encoder_or_decoder,
        checkpointing_context={},
        cfg_container=config,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    model, args = compat.unwrapped(chunks)[0], get_args()
    if not args.probe_steps:
        write_probe(model, args, args.probe_output)
    for step in args.probe_steps:
        args.ckpt_step = step
        args.finetune = args.no_load_optim = args.no_load_rng = True  # weights alone: counters stay as they are
        load_checkpoint(chunks, None, None, checkpointing_context={})
        write_probe(model, args, args.probe_output.with_stem(f"{args.probe_output.stem}-{step}"))
    torch.distributed.destroy_process_group()


def write_probe(model: Any, args: Any, output: Path) -> None:
    """Write the states, the labels and the tokens of the first validation sample."""
    _, validation, _ = datasets_provider([0, 1, 0])
    sample = {name: torch.as_tensor(value) for name, value in validation[0].items() if value is not None}
    tokenizer = build_tokenizer(args)
    pieces = (tokenizer.detokenize([int(token)]) for token in sample["tokens"])
    output.parent.mkdir(parents=True, exist_ok=True)
    np.savez(
        output,
        hidden=hidden_states(model, sample).numpy(),
        labels=sample["labels"].numpy(),
        tokens=np.array([piece or " " for piece in pieces]),
    )
    print(f"> wrote {output}")


if __name__ == "__main__":
    main()
