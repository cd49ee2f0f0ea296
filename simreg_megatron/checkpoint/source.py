# SPDX-License-Identifier: Apache-2.0
"""A Megatron checkpoint as a whole: its arguments, and its weights by canonical name, from either format."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from simreg_megatron.checkpoint import weights
from simreg_megatron.checkpoint.dist_format import METADATA, DistCheckpoint, Place, Stored
from simreg_megatron.checkpoint.errors import CheckpointError
from simreg_megatron.checkpoint.pickles import Inert, load_torch
from simreg_megatron.checkpoint.rank_files import RankFiles, is_rank_format
from simreg_megatron.checkpoint.weights import Weight

TRACKER = "latest_checkpointed_iteration.txt"
_COMMON, _CONFIG = "common.pt", "metadata.json"
_LEARNED = "simreg_"  # scalars that some objectives train: no part of the language model
_SETTINGS = {
    "qb_beta": "moe_router_load_balancing_type = quantile_balancing",
    "expert_bias": "moe_router_enable_expert_bias",
}


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds.

    Attributes:
        folder: the one with the files.
        format: "torch_dist" or "torch".
        args: Megatron's arguments at the time of saving; what is no plain value is an `Inert`.
        weights: by canonical name (`checkpoint.weights`), read when asked for.
        notes: a line for everything that is left out, for the user.
    """

    folder: Path
    format: str
    args: dict[str, Any]
    weights: dict[str, Weight]
    notes: list[str] = field(default_factory=list)


def open_checkpoint(load: Path, step: int | None = None) -> Checkpoint:
    """Open what Megatron's --load would: a folder of checkpoints (the newest, or `step`), or one checkpoint's own.

    Raises:
        CheckpointError: there is none, or it cannot be read safely and whole.
    """
    folder = step_folder(load, step)
    try:
        if (folder / METADATA).is_file():
            return _open_dist(folder)
        if is_rank_format(folder):
            return _open_ranks(folder)
    except CheckpointError:
        raise
    except (LookupError, AttributeError, TypeError, ValueError, ArithmeticError, RuntimeError, MemoryError) as error:
        raise CheckpointError(
            f"{folder} is not built as Megatron builds checkpoints ({type(error).__name__}: {error}): "
            "copy it again from where it was made"
        ) from None
    if (folder / _CONFIG).is_file():
        backend = _backend(folder)
        if backend != "torch_dist":
            raise CheckpointError(
                f"{folder} is in the format {backend}: load it in Megatron and save it with --ckpt-format torch_dist"
            )
        raise CheckpointError(f"{folder} has no {METADATA}: it was not saved or not copied completely")
    raise CheckpointError(f"{folder} holds no Megatron checkpoint: neither {METADATA} nor mp_rank_* is there")


def step_folder(load: Path, step: int | None) -> Path:
    """Where Megatron put the checkpoint of this step, or of the last one."""
    if not load.is_dir():
        raise CheckpointError(f"there is no folder {load}: give the folder that Megatron's --save named")
    tracker = load / TRACKER
    if step is None:
        if not tracker.is_file():
            if (load / "checkpoints" / TRACKER).is_file():
                raise CheckpointError(f"{load} is the folder of a run: give its checkpoints, {load / 'checkpoints'}")
            if any(load.glob("iter_*")):
                raise CheckpointError(f"{load} has no {TRACKER}: say which step to take with --ckpt-step")
            return load
        text = tracker.read_text(errors="replace").strip()
        if text != "release" and not (text.isdecimal() and len(text) < 20):
            raise CheckpointError(f"{tracker} does not hold a number of steps: say which step with --ckpt-step")
        name = text if text == "release" else f"iter_{int(text):07d}"
    else:
        name = f"iter_{step:07d}"
    if not (load / name).is_dir():
        there = ", ".join(sorted(path.name for path in load.glob("iter_*"))[-5:]) or "none"
        raise CheckpointError(f"{load} has no {name}; there: {there}")
    return load / name


def _backend(folder: Path) -> Any:
    try:
        return json.loads((folder / _CONFIG).read_text()).get("sharded_backend")
    except (ValueError, AttributeError, RecursionError):
        raise CheckpointError(f"{folder / _CONFIG} is damaged: copy the checkpoint again") from None


def _open_dist(folder: Path) -> Checkpoint:
    if not (folder / _CONFIG).is_file():
        raise CheckpointError(
            f"{folder} has {METADATA} and no {_CONFIG}: it is of torch_dcp or fsdp_dtensor, or of another program; "
            "save it from Megatron with --ckpt-format torch_dist"
        )
    stored = DistCheckpoint(folder)
    args = _args(_common(folder, stored), folder)
    notes: list[str] = []
    parts: list[tuple[str, str, Weight]] = []
    for key, tensor in stored.tensors.items():
        name = weights.parse(key)
        if name is None:
            _leave_out(key, notes)
            continue
        parts.extend((weight_name, name.half, weight) for weight_name, weight in _unstacked(name, tensor))
    return Checkpoint(folder, "torch_dist", args, weights.joined_halves(parts), notes)


def _unstacked(name: weights.Name, tensor: Stored) -> Iterator[tuple[str, Weight]]:
    """The single weights of a tensor that may be stacked over layers, over experts, or over both."""
    num_stacked = (name.is_layered and name.layer is None) + (name.has_experts and name.expert is None)
    if len(tensor.shape) < num_stacked:
        raise CheckpointError(f"{tensor.name} has the shape {tensor.shape}, too few dimensions for its name")
    if not all(tensor.shape):
        raise CheckpointError(f"{tensor.name} has the shape {tensor.shape}, so it holds no numbers")
    for index in _indices(tensor.shape[:num_stacked]):
        numbers = list(index)
        layer = numbers.pop(0) if name.is_layered and name.layer is None else name.layer
        expert = numbers.pop(0) if name.has_experts and name.expert is None else name.expert
        read: Callable[[], Any] = partial(tensor.read, index)
        yield (
            weights.canonical(name.rest, layer, expert),
            Weight(tensor.shape[num_stacked:], tensor.dtype, read),
        )


def _indices(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if not shape:
        yield ()
        return
    for first in range(shape[0]):
        for rest in _indices(shape[1:]):
            yield (first, *rest)


def _common(folder: Path, stored: DistCheckpoint) -> Any:
    """What is not a tensor: `common.pt` up to Megatron 0.18, an object among the others from 0.19 on."""
    path = folder / _COMMON
    if path.is_file():
        return load_torch(path, path=path)
    place: Place | None = next((p for key, p in stored.objects.items() if key.startswith("common_state/")), None)
    if place is None:
        raise CheckpointError(f"{folder} has no {_COMMON}: it is not Megatron's, or was not copied completely")
    loaded = place.read()
    return loaded[0] if isinstance(loaded, list) and loaded else loaded


def _args(common: Any, folder: Path) -> dict[str, Any]:
    args = common.get("args") if isinstance(common, dict) else None
    if not isinstance(args, Inert):
        raise CheckpointError(
            f"{folder} does not say with which arguments it was trained: it was not saved by Megatron's own loop"
        )
    return {
        name: value if _is_plain(value) else Inert(value) for name, value in vars(args).items() if name != "arguments"
    }


def _is_plain(value: Any) -> bool:
    """What can be compared without asking the value: a tensor would answer with another tensor."""
    return isinstance(value, bool | int | float | str | list | tuple | torch.dtype | Inert | None)


def _leave_out(key: str, notes: list[str]) -> None:
    if weights.is_dropped(key):
        return
    if key.startswith(_LEARNED):
        notes.append(f"left out: {key}, which SimReg trained and the language model does not use")
        return
    setting = next((f" (of {setting})" for name, setting in _SETTINGS.items() if name in key), "")
    raise CheckpointError(f"{key}{setting} is no weight of a LLaMA or Mixtral: a model that has it cannot be converted")


def _open_ranks(folder: Path) -> Checkpoint:
    files = RankFiles(folder)
    notes: list[str] = []
    for key in files.names:
        if weights.parse(key) is None and not key.endswith(("mlp.experts.weight1", "mlp.experts.weight2")):
            _leave_out(key, notes)
    return Checkpoint(folder, "torch", _args(files.common, folder), files.weights(), notes)
