# SPDX-License-Identifier: Apache-2.0
"""Megatron's older `torch` format: one file per tensor, pipeline and expert rank, put together again.

`mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt` holds the state dict of one rank, with layers counted from 0 on every stage
and, under virtual pipelining, one model after the other (`model0`, `model1`, ...). Files are mapped, not read: only the
weights that are asked for come into memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from simreg_megatron.checkpoint import weights
from simreg_megatron.checkpoint.errors import CheckpointError
from simreg_megatron.checkpoint.pickles import Inert, load_torch
from simreg_megatron.checkpoint.weights import Weight
from simreg_megatron.sentences import brief

_FOLDER = re.compile(r"mp_rank_\d{2,}(?:_\d{3}){0,2}")
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_COPY = "copy the checkpoint again from where it was made"
_GROUPED = {"mlp.experts.weight1": 1, "mlp.experts.weight2": 2}  # all experts of a rank in one matrix
_ACROSS = (weights.PROJ, weights.FC2)  # split along the inputs; all other matrices along the outputs

Models = dict[tuple[int, int, int], dict[str, Tensor]]  # (tensor rank, place in the model, expert rank) -> state dict


def is_rank_format(folder: Path) -> bool:
    return any(_FOLDER.fullmatch(path.name) for path in folder.iterdir())


class RankFiles:
    """One folder of the `torch` format.

    Attributes:
        common: what the first rank's file holds beside the weights.
        names: every name that some rank has, for what is not a weight.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        first = self._file(min(path.name for path in folder.iterdir() if _FOLDER.fullmatch(path.name)))
        self.common: dict[str, Any] = self._load(first)
        args = self.common.get("args")
        if not isinstance(args, Inert):
            raise CheckpointError(f"{first} does not say with which arguments it was trained: it is not Megatron's")
        self.args = vars(args)
        self._tensor = self._size("tensor_model_parallel_size")
        self._stages = self._size("pipeline_model_parallel_size")
        self._experts = self._size("expert_model_parallel_size")
        self._check_expert_tensor_parallelism()
        self._check_number_of_files()
        self.models, self.num_places = self._models()
        self.names = sorted({name for model in self.models.values() for name in model})

    def _size(self, name: str, least: int = 1) -> int:
        size = self.args.get(name) or least
        if not isinstance(size, int) or size < least:
            raise CheckpointError(f"{self.folder} gives {name} as {brief(size)}: {_COPY}")
        return size

    def _check_expert_tensor_parallelism(self) -> None:
        own = self.args.get("expert_tensor_parallel_size") or self._tensor
        if self.args.get("num_experts") and own != self._tensor:
            raise CheckpointError(
                f"experts are split over {brief(own)} tensor ranks and the rest over {self._tensor}, which the torch "
                "format does not record: load it in Megatron and save it with --ckpt-format torch_dist"
            )

    def _check_number_of_files(self) -> None:
        there = sum(1 for path in self.folder.iterdir() if _FOLDER.fullmatch(path.name))
        if (needed := self._tensor * self._stages * self._experts) > there:
            raise CheckpointError(
                f"{self.folder} has {there} folders mp_rank_*, and its arguments say {needed}: {_COPY}"
            )

    def _file(self, name: str) -> Path:
        for file in _FILES:
            if (self.folder / name / file).is_file():
                return self.folder / name / file
        raise CheckpointError(f"{self.folder / name} is missing or holds no {_FILES[0]}: {_COPY}")

    def _load(self, path: Path) -> dict[str, Any]:
        loaded = load_torch(path, path=path)
        if not isinstance(loaded, dict):
            raise CheckpointError(f"{path} is not a Megatron checkpoint: it holds a {type(loaded).__name__}")
        return loaded

    def _models(self) -> tuple[Models, int]:
        """State dicts by rank and place; places are virtual stages, in the order of the layers."""
        found: Models = {}
        num_virtual = 1
        for tensor, stage, expert in product(range(self._tensor), range(self._stages), range(self._experts)):
            name = f"mp_rank_{tensor:02d}"
            name += f"_{stage:03d}" * (self._stages > 1) + f"_{expert:03d}" * (self._experts > 1)
            path = self._file(name)
            loaded = self._load(path)
            names = [key for key in loaded if isinstance(key, str)]
            stages = [key for key in names if re.fullmatch(r"model\d+", key)]  # model10 comes after model9
            keys = ["model"] if "model" in names else sorted(stages, key=lambda key: int(key.removeprefix("model")))
            num_virtual = max(num_virtual, len(keys))
            for virtual, key in enumerate(keys):
                state = {str(k): _sound(t, path) for k, t in dict(loaded[key]).items() if isinstance(t, Tensor)}
                found[tensor, virtual * self._stages + stage, expert] = state
            if not keys:
                raise CheckpointError(f"{path} holds no model: {_COPY}")
        return found, num_virtual * self._stages

    def weights(self) -> dict[str, Weight]:
        """Whole weights by their canonical names (`checkpoint.weights`); layers counted over all stages."""
        parts: list[tuple[str, str, Weight]] = []
        layers_before = 0
        for place in range(self.num_places):
            num_layers = 0
            for expert in range(self._experts):
                ranks = [self._ungrouped(self.models[tensor, place, expert]) for tensor in range(self._tensor)]
                if any(rank.keys() != ranks[0].keys() for rank in ranks):
                    raise CheckpointError(f"{self.folder}: tensor ranks hold different weights; {_COPY}")
                for key in ranks[0]:
                    name = weights.parse(key)
                    if name is None:
                        continue
                    layer = None
                    if name.layer is not None:
                        num_layers = max(num_layers, name.layer + 1)
                        layer = layers_before + name.layer
                    number = name.expert
                    if number is not None:
                        number += expert * self._experts_per_rank()
                    elif expert:
                        continue  # every expert rank holds all that is not an expert
                    whole = self._joined(name.rest, [rank[key] for rank in ranks])
                    parts.append((weights.canonical(name.rest, layer, number), name.half, whole))
            layers_before += num_layers
        return weights.joined_halves(parts)

    def _experts_per_rank(self) -> int:
        return self._size("num_experts", least=0) // self._experts

    def _ungrouped(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Experts in one matrix as one matrix each: Megatron keeps them transposed, one after the other."""
        apart: dict[str, Tensor] = {}
        for key, tensor in state.items():
            layer, _, rest = key.partition("mlp.experts.")
            kind = _GROUPED.get(f"mlp.experts.{rest}")
            if kind is None:
                apart[key] = tensor
                continue
            count, hidden = self._experts_per_rank(), self._size("hidden_size")
            if not count or not tensor.numel() or tensor.numel() % (count * hidden):
                raise CheckpointError(f"{self.folder}: {key} is not of {count} experts of width {hidden}; {_COPY}")
            each = tensor.reshape(count, hidden, -1) if kind == 1 else tensor.reshape(count, -1, hidden)
            for number, matrix in enumerate(each):
                apart[f"{layer}{weights.expert_name(number, kind)}"] = matrix.t()
        return apart

    def _joined(self, rest: str, ranks: Sequence[Tensor]) -> Weight:
        read: Callable[[], Tensor]
        if any((rank.shape, rank.dtype) != (ranks[0].shape, ranks[0].dtype) for rank in ranks):
            raise CheckpointError(f"{self.folder}: tensor ranks hold parts of {rest} that do not fit together; {_COPY}")
        shape = list(ranks[0].shape)
        if len(shape) == 1 or rest == weights.ROUTER:
            read = partial(self._replica, rest, ranks)
        else:
            dimension = 1 if rest in _ACROSS or rest.endswith("linear_fc2.weight") else 0
            shape[dimension] *= len(ranks)
            read = partial(_concatenated, ranks, dimension, weights.is_gated(rest))
        return Weight(tuple(shape), ranks[0].dtype, read)

    def _replica(self, rest: str, ranks: Sequence[Tensor]) -> Tensor:
        if not all(torch.equal(rank, ranks[0]) for rank in ranks):
            raise CheckpointError(
                f"{self.folder}: tensor ranks hold different values of {rest}, which all of them should share; {_COPY}"
            )
        return ranks[0].clone()


def _sound(tensor: Tensor, path: Path) -> Tensor:
    """One that is as large as its bytes: a view can repeat a single number without end."""
    is_plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    if not is_plain or tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
        raise CheckpointError(f"{path} holds a tensor that is larger than its bytes, or none of plain numbers: {_COPY}")
    return tensor


def _concatenated(ranks: Sequence[Tensor], dimension: int, gated: bool) -> Tensor:
    """The ranks' parts in their order; of a gated layer all gates, then all ups, for a rank holds a part of both."""
    if not gated:
        return torch.cat(list(ranks), dim=dimension)
    gates, ups = zip(*(rank.chunk(2) for rank in ranks), strict=True)
    return torch.cat([*gates, *ups])
