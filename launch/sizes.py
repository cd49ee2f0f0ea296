# SPDX-License-Identifier: Apache-2.0
"""Compute sizes from a model's flags, and fit those of a preset to each other and to the ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from launch.flags import Flag, LaunchError, flag_name, flag_names, flag_number, flag_value, without
from launch.planned import Machine

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
    return max(size for size in range(1, min(number, limit) + 1) if number % size == 0)


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


def fit_preset(
    preset: list[Flag], user: Sequence[Flag], ffn: str, machine: Machine, *, strict: bool
) -> tuple[list[Flag], list[str]]:
    """Return the preset with fitting sizes, and notes; `strict` refuses another global batch than the preset's."""
    notes: list[str] = []
    check_layout([*preset, *user], machine)
    for name in ("--num-layers", "--save-interval", "--log-interval", "--eval-interval", "--seq-length"):
        flag_number(user, name, 1)  # refuses what is no positive number
    preset = _fit_ffn(preset, user, ffn, notes)
    preset = _fit_batch(preset, user, machine, notes, strict=strict)
    preset = _fit_warmup(_in_samples(preset, user, notes), user, notes)
    return [*preset, ("--max-position-embeddings", flag_value([*preset, *user], "--seq-length") or "")], notes


def _fit_ffn(preset: list[Flag], user: Sequence[Flag], ffn: str, notes: list[str]) -> list[Flag]:
    name = "--ffn-hidden-size"
    split, literal = ffn_split([*preset, *user]), flag_number(preset, name, 1)
    if ffn != "literal":
        if name in flag_names(user):
            raise LaunchError(f"--ffn and {name} name the same size: give one")
        if ffn != "aligned" and not (ffn.isdecimal() and int(ffn)):
            raise LaunchError(f"--ffn takes literal, aligned or a positive number, not {ffn!r}")
        size = aligned_size(literal, split) if ffn == "aligned" else int(ffn)
        preset = _replace(preset, name, str(size))
    warning = check_ffn(flag_number([*preset, *user], name, 1), split)
    notes += [warning] if warning else []
    return preset


def _fit_batch(
    preset: list[Flag], user: Sequence[Flag], machine: Machine, notes: list[str], *, strict: bool
) -> list[Flag]:
    """Choose a micro-batch that divides each replica's share of the global batch, unless the user chose one."""
    if "--step-batch-size-schedule" in flag_names(user):
        raise LaunchError(
            "--step-batch-size-schedule excludes the preset's --global-batch-size: leave it out, or start "
            "`torchrun -m simreg_megatron simreg_megatron/pretrain.py` with all flags of your own"
        )
    both = [*preset, *user]
    replicas = machine.world_size // math.prod(model_parallel_sizes(both))
    batch = flag_number(both, "--global-batch-size", 1)
    if batch % replicas:
        fitting = -(-batch // replicas) * replicas
        if strict or "--global-batch-size" in flag_names(user):
            raise LaunchError(
                f"the global batch of {batch} sequences cannot be shared by {replicas} data-parallel ranks: "
                f"{_fewer_ranks(both, machine)}give --global-batch-size {fitting} (in a new run)"
            )
        notes.append(f"{replicas} data-parallel ranks cannot share {batch} sequences: using {fitting}")
        batch, preset = fitting, _replace(preset, "--global-batch-size", str(fitting))
    share = batch // replicas
    if "--rampup-batch-size" in flag_names(user):  # a tiny preset names no micro-batch, and 1 divides every size
        return preset if "--micro-batch-size" in flag_names(both) else [*preset, ("--micro-batch-size", "1")]
    if "--micro-batch-size" in flag_names(user):
        micro = flag_number(user, "--micro-batch-size", 1)
        if share % micro:
            raise LaunchError(
                f"each of {replicas} data-parallel ranks has {share} sequences of the global batch, which "
                f"micro-batches of {micro} cannot share: give --micro-batch-size {largest_divisor(share, micro)}"
            )
        return preset
    # The tiny presets name none: the whole share, or what leaves each pipeline stage a micro-batch.
    stages = flag_number(both, "--pipeline-model-parallel-size", 1)
    limit = flag_number(preset, "--micro-batch-size", max(1, share // stages))
    return _replace(preset, "--micro-batch-size", str(largest_divisor(share, limit)))


def _in_samples(preset: list[Flag], user: Sequence[Flag], notes: list[str]) -> list[Flag]:
    """Drop the preset's length and warm-up if the user gives a length in samples, which excludes iterations."""
    if "--train-samples" not in flag_names(user):
        return preset
    batch, samples = flag_number([*preset, *user], "--global-batch-size", 1), flag_number(user, "--train-samples", 1)
    warmup = min(batch * flag_number(preset, "--lr-warmup-iters", 1), samples // 10)
    preset = without(preset, {"--train-iters", "--lr-decay-iters", "--lr-warmup-iters"})
    if flag_names(user) & {"--lr-warmup-samples", "--lr-warmup-fraction", "--lr-warmup-iters"}:
        return preset
    notes.append(f"--train-samples: warming up for {warmup} of {samples} samples (set --lr-warmup-samples to choose)")
    return [*preset, ("--lr-warmup-samples", str(warmup))]


def _fit_warmup(preset: list[Flag], user: Sequence[Flag], notes: list[str]) -> list[Flag]:
    """Shorten the warm-up of a short run: Megatron refuses one as long as the decay."""
    name, both = "--lr-warmup-iters", [*preset, *user]
    end = flag_number(both, "--lr-decay-iters", flag_number(both, "--train-iters", 1))
    own = flag_value(user, name) or ""
    if own.isdecimal() and int(own) >= end and "--train-samples" not in flag_names(user):
        raise LaunchError(f"{name} {own} leaves none of {end} iterations for the decay: give a smaller number")
    if "--lr-warmup-fraction" in flag_names(user):  # Megatron takes one of the two
        return without(preset, {name})
    if flag_names(user) & {name, "--train-samples"} or flag_number(preset, name, 1) < end:
        return preset
    notes.append(f"{end} iterations are too few for the preset's warm-up: using {end // 10} (set {name} to choose)")
    return _replace(preset, name, str(end // 10))


def _replace(flags: list[Flag], name: str, value: str) -> list[Flag]:
    """Change one value in its place, or add the flag at the end."""
    if name not in flag_names(flags):
        return [*flags, (name, value)]
    return [(name, value) if flag_name(flag) == name else flag for flag in flags]


def check_layout(flags: Sequence[Flag], machine: Machine) -> None:
    """Refuse ranks that cannot be divided among replicas, which a plan has to do before Megatron is asked."""
    tensor, pipeline, context = model_parallel_sizes(flags)
    ranks = tensor * pipeline * context
    if machine.world_size % ranks:
        raise LaunchError(
            f"one replica takes TP {tensor} x PP {pipeline} x CP {context} = {ranks} ranks, and {machine.world_size} "
            f"cannot be divided among replicas: {_fewer_ranks(flags, machine)}give smaller sizes"
        )


def _fewer_ranks(flags: Sequence[Flag], machine: Machine) -> str:
    """Name the most ranks (at least one replica) that fill replicas and nodes and share the global batch, if any do."""
    node = machine.local_world_size if machine.whole_nodes else 0
    ranks, batch = math.prod(model_parallel_sizes(flags)), flag_number(flags, "--global-batch-size", 1)
    unit = math.lcm(ranks, node or 1)
    counts = range(max(machine.world_size // unit, 1) * unit, 0, -unit)
    count = next((count for count in counts if batch % (count // ranks) == 0), 0)
    if not count:
        return ""
    return f"give --nodes {count // node} before the script, or " if node else f"start {count} (--nproc-per-node), or "
