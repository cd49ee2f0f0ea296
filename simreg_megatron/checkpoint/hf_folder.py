# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face model on disk: config.json and safetensors files, nothing that could run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from simreg_megatron.checkpoint.architecture import Architecture
from simreg_megatron.checkpoint.errors import CheckpointError
from simreg_megatron.checkpoint.huggingface import Target, architecture_of, joined, targets
from simreg_megatron.checkpoint.weights import Weight

_CONFIG, _INDEX, _SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
_COPY = "get the model again from where it is published"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # any other cannot be imported
# Buffers that old releases of transformers saved beside the weights.
_NO_WEIGHT = ("rotary_emb.inv_freq", "masked_bias")


@dataclass(frozen=True)
class HuggingFaceModel:
    """What the folder holds: its numbers, and its weights as Megatron names and joins them."""

    folder: Path
    architecture: Architecture
    weights: dict[str, Weight]


def open_model(folder: Path) -> HuggingFaceModel:
    """Look at a folder without reading its tensors.

    Raises:
        CheckpointError: it is no LLaMA or Mixtral in safetensors files, or it is not whole.
    """
    entries = _json(folder / _CONFIG)
    files = _files(folder)
    dtypes = {dtype for _, dtype, _ in files.values()}
    if len(dtypes) != 1 or not (dtype := dtypes.pop()).is_floating_point:
        raise CheckpointError(f"{folder} holds tensors of several or of no floating types: save it in one of them")
    architecture = architecture_of(entries, dtype=str(dtype).removeprefix("torch."))
    groups: dict[str, list[Target]] = {}
    for target in targets(architecture):
        found = files.pop(target.name, None)
        if found is None:
            raise CheckpointError(f"{folder} has no {target.name}, which its {_CONFIG} calls for: {_COPY}")
        if found[2] != target.shape:
            raise CheckpointError(f"{target.name} has the shape {found[2]}, and {_CONFIG} says {target.shape}: {_COPY}")
        groups.setdefault(target.source, []).append(target)
    if architecture.is_tied:
        files.pop("lm_head.weight", None)
    if files:
        raise CheckpointError(f"{folder} has {min(files)}, which Megatron's {architecture.family} has no place for")
    paths = {name: path for name, (path, _, _) in _files(folder).items()}
    shapes = dict(architecture.shapes(architecture.vocabulary))
    return HuggingFaceModel(
        folder,
        architecture,
        {
            source: Weight(shapes[source], dtype, partial(_read, source, group, paths, architecture))
            for source, group in groups.items()
        },
    )


def _read(source: str, group: list[Target], paths: Mapping[str, Path], architecture: Architecture) -> Tensor:
    return joined(source, [_tensor(paths[target.name], target.name) for target in group], architecture)


def _json(path: Path) -> dict[str, Any]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"there is no {path}: give the folder of a Hugging Face model") from None
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): {_COPY}") from None
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path} holds no table: {_COPY}")
    return entries


def _files(folder: Path) -> dict[str, tuple[Path, torch.dtype, tuple[int, ...]]]:
    """(file, type, shape) of every tensor, from the files' own headers."""
    if (folder / _INDEX).is_file():
        table = _json(folder / _INDEX).get("weight_map")
        if not isinstance(table, dict) or not table:
            raise CheckpointError(f"{folder / _INDEX} has no table weight_map: {_COPY}")
        names = sorted({str(name) for name in table.values()})
    elif (folder / _SINGLE).is_file():
        names = [_SINGLE]
    else:
        raise CheckpointError(
            f"{folder} has no safetensors files: save the model with transformers' save_pretrained, which writes them "
            "(pickled .bin files could run code and are not read)"
        )
    found = {}
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{folder / _INDEX} points outside its folder, to {name!r}: {_COPY}")
        found.update(_header(folder / name))
    return {name: entry for name, entry in found.items() if not name.endswith(_NO_WEIGHT)}


def _header(path: Path) -> dict[str, tuple[Path, torch.dtype, tuple[int, ...]]]:
    from safetensors import safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
            return {
                name: (path, _DTYPES.get(cut.get_dtype(), torch.uint8), tuple(cut.get_shape()))
                for name, cut in slices.items()
            }
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read ({error}): {_COPY}") from None


def _tensor(path: Path, name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor
