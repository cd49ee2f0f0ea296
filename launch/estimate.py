# SPDX-License-Identifier: Apache-2.0
"""Estimate what each size needs on its layout: `python -m launch.estimate`. Nothing is measured.

Memory and FLOPs are Megatron's own estimates; time follows from the share of the peak that is assumed.
"""

from __future__ import annotations

import argparse
import copy
import math
import re
from pathlib import Path

from launch import preflight, sizes
from launch.dry_run import ASSUMED_VOCABULARY
from launch.flags import flag_number
from launch.options import LAYOUTS, layout_names, make_parser, read_layout
from launch.plan import build_plan
from launch.planned import Machine
from launch.sizes import PEAK, SHARE_OF_PEAK

_GPUS_PER_NODE = 8
_BEGIN, _END = "<!-- launch.estimate -->", "<!-- end -->"  # of the table in a page
_HOLDS_LESS = (  # than Megatron's formulas say
    "use_torch_fsdp2", "use_megatron_fsdp", "optimizer_cpu_offload", "use_precision_aware_optimizer",
    "recompute_granularity", "cpu_offloading", "fine_grained_activation_offloading",
)  # fmt: skip
_COLUMNS = (
    "model", "nodes", "TP x PP x EP, DP", "micro-batch", "recompute", "weights, optimizer (GiB)", "activations (GiB)",
    "sum (GiB)", "checkpoint (GiB)", "tokens (billion)", "tokens/s per GPU", "step (s)", "hours", "GPU hours",
)  # fmt: skip


def row(layout: str, model: str) -> tuple[float, list[str]]:
    """Ask Megatron about a model such as llama-7b; return its FLOPs per token, and the cells of its line."""
    family, _, size = model.partition("-")
    nodes = flag_number(read_layout(layout, family, size), "--nodes", 1)
    world = nodes * _GPUS_PER_NODE
    machine = Machine(_GPUS_PER_NODE, True, world_size=world, local_world_size=_GPUS_PER_NODE)
    words = ["--model", size, "--layout", layout, "--data", "text", "--tokenizer", "tokenizer.model"]
    options, rest = make_parser(family).parse_known_args(words)
    plan = build_plan(family, options, rest, machine, environ={})
    answer = preflight.check_with_megatron(plan, machine)
    args = answer.args if answer else None
    if args is None:
        raise SystemExit(f"error: cannot ask Megatron for {model}: {answer.objection if answer else 'see make setup'}")
    weights, activations = gpu_memory(args, ASSUMED_VOCABULARY) or (math.nan, math.nan)
    from megatron.training.training import num_floating_point_operations

    args.padded_vocab_size = ASSUMED_VOCABULARY
    flops = num_floating_point_operations(args, args.global_batch_size)
    tokens, seconds = args.global_batch_size * args.seq_length, flops / (world * PEAK * SHARE_OF_PEAK)
    hours = seconds * args.train_iters / 3600
    parallel = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.expert_model_parallel_size)
    checkpoint = sizes.checkpoint_bytes(plan.flags, vocabulary=ASSUMED_VOCABULARY) / 2**30
    memory = weights, activations, weights + activations, checkpoint
    return flops / tokens, [
        model,
        str(nodes),
        f"{' x '.join(map(str, parallel))}, {args.data_parallel_size}",
        str(args.micro_batch_size),
        args.recompute_granularity or "none",
        *("-" if math.isnan(gib) else f"{gib:.1f}" for gib in memory),
        f"{tokens * args.train_iters / 1e9:.1f}",
        f"{tokens / seconds / world:,.0f}",
        f"{seconds:.1f}",
        f"{hours:.1f}",
        f"{hours * world:,.0f}",
    ]


def gpu_memory(args: argparse.Namespace, vocabulary: int) -> tuple[float, float] | None:
    """Ask Megatron for its estimate of weights with gradients and optimizer, and of activations, in GiB a GPU.

    None if this release has no estimate, or the run holds less than the formula says, by recomputation for example.
    """
    if any(getattr(args, name, None) for name in _HOLDS_LESS):
        return None
    args = copy.copy(args)
    args.padded_vocab_size = vocabulary
    args.seq_length //= args.context_parallel_size  # which the formula leaves out
    micro_batches = args.global_batch_size // args.micro_batch_size // args.data_parallel_size
    with preflight.silence():
        from megatron.training.theoretical_memory_usage import report_theoretical_memory

        memory = report_theoretical_memory(args, num_microbatches=micro_batches)
    return None if memory is None else (memory[0] / 1024, memory[1] / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m launch.estimate", description=__doc__)
    parser.add_argument("--layout", default="h800", choices=layout_names(), help="default: h800")
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"put the table there, between {_BEGIN} and {_END}")
    options = parser.parse_args()
    models = [path.stem for path in (LAYOUTS / options.layout).glob("*.args")]
    rows = [cells for _, cells in sorted(row(options.layout, model) for model in models)]
    lines = [f"| {' | '.join(cells)} |" for cells in (_COLUMNS, ["---"] * len(_COLUMNS), *rows)]
    print("\n".join(lines))
    if options.output:
        from tools import tables  # which are of the repository alone: nothing that runs needs them

        text, page = "\n".join([tables.stamp("estimate"), "", *lines, ""]), options.output.read_text(encoding="utf-8")
        page, found_places = re.subn(f"(?s)(?<={_BEGIN}\n).*?(?=\n{_END})", lambda _: text, page)
        if not found_places:
            raise SystemExit(f"error: {options.output} has no lines {_BEGIN} and {_END} to put the table between")
        options.output.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
