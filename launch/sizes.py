# SPDX-License-Identifier: Apache-2.0
"""Compute sizes from a model's flags: FFN sizes that can be split, parameters, bytes of a checkpoint."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from launch.flags import Flag, LaunchError, flag_names, flag_number, flag_value

PEAK = 989e12  # bf16 FLOP/s of an H800, dense
SHARE_OF_PEAK = 0.4  # that a run is assumed to reach
_TILE = 128  # columns of a tensor core's tile: a matrix side of this multiple leaves no ragged tile
_WORDS = 8  # 16 bytes of bf16: below this alignment tensor cores run below full speed, or idle


def model_parallel_sizes(flags: Sequence[Flag]) -> tuple[int, int, int]:
    """Return tensor, pipeline and context; a replica is held by their product of ranks."""
    names = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size")
    tensor, pipeline, context = (flag_number(flags, name, 1) for name in names)
    return tensor, pipeline, context


def ffn_split(flags: Sequence[Flag]) -> int:
    """Return the ranks that share one FFN: experts may be split otherwise than the rest."""
    tensor = flag_number(flags, "--tensor-model-parallel-size", 1)
    if "--num-experts" in flag_names(flags):
        return flag_number(flags, "--expert-tensor-parallel-size", tensor)
    return tensor


def aligned_size(size: int, split: int) -> int:
    """Return the nearest size of full tiles that leaves each rank 16-byte aligned rows."""
    unit = math.lcm(_TILE, _WORDS * split)
    return max(1, (size + unit // 2) // unit) * unit


def check_ffn(size: int, split: int) -> str | None:
    """Return a warning if tensor cores will run this FFN slowly; refuse one that the ranks cannot share."""
    if size % split:
        raise LaunchError(
            f"the FFN size {size} cannot be split over {split} tensor-parallel ranks: give --ffn aligned "
            f"({aligned_size(size, split)}), --ffn SIZE, or --tensor-model-parallel-size 1"
        )
    if size // split % _WORDS:
        return (
            f"{size // split} columns of the FFN a rank are no multiple of {_WORDS}, so tensor cores run below their "
            f"speed: --ffn aligned takes {aligned_size(size, split)}"
        )
    return None


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor that is at most `limit`."""
    return max(size for size in range(1, limit + 1) if number % size == 0)


def count_parameters(flags: Sequence[Flag], *, vocabulary: int, active: bool = False) -> int:
    """Count the weights: attention, SwiGLU (times experts) and Mamba's layers, their RMSNorms, embedding and head.

    `active` counts those that one token meets: of the experts only the chosen ones, and no embedding table.
    """
    given = flag_names(flags)
    hidden, pattern = flag_number(flags, "--hidden-size", 1), flag_value(flags, "--hybrid-layer-pattern")
    layers = Counter(pattern or "*-" * flag_number(flags, "--num-layers", 1))
    heads = flag_number(flags, "--num-attention-heads", 1)
    head_size = flag_number(flags, "--kv-channels", hidden // heads)
    groups = flag_number(flags, "--num-query-groups", heads) if "--group-query-attention" in given else heads
    ffn = flag_number(flags, "--ffn-hidden-size", 4 * hidden)
    experts = flag_number(flags, "--num-experts", 0)
    if experts:
        ffn = flag_number(flags, "--moe-ffn-hidden-size", ffn)
    used = min(experts, flag_number(flags, "--moe-router-topk", 2)) if active else experts
    attention = 2 * hidden * head_size * (heads + groups)
    feed_forward = 3 * hidden * ffn * max(used, 1) + hidden * experts  # the last term is the router
    inner, size = 2 * hidden, flag_number(flags, "--mamba-head-dim", 64)
    mixed = 2 * flag_number(flags, "--mamba-num-groups", 8) * flag_number(flags, "--mamba-state-dim", 128)
    mamba = hidden * (3 * inner + mixed + inner // size) + 5 * (inner + mixed) + 3 * inner // size + inner
    kinds = {"*": attention, "-": feed_forward, "M": mamba}
    blocks = sum(layers[kind] * (weights + hidden) for kind, weights in kinds.items())
    tables = 2 if "--untie-embeddings-and-output-weights" in given and not active else 1
    return blocks + hidden + tables * vocabulary * hidden


_ADAM = 8  # bytes of a weight: its two averages in float32
_MASTER = 4  # its float32 value, which a run in 16 bits keeps in addition to the weight that it trains with


def checkpoint_bytes(flags: Sequence[Flag], *, vocabulary: int) -> int:
    """Return the bytes of a checkpoint with the weights and Adam's state, as Megatron saves them."""
    given = flag_names(flags)
    in_half = bool(given & {"--bf16", "--fp16"})
    state = 0 if "--no-save-optim" in given else _ADAM + (_MASTER if in_half else 0)
    return ((2 if in_half else 4) + state) * count_parameters(flags, vocabulary=vocabulary)
