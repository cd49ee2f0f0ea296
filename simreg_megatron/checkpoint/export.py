# SPDX-License-Identifier: Apache-2.0
"""Write a Megatron checkpoint as a Hugging Face model: one shard of tensors in memory at a time, all or nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from simreg_megatron.checkpoint.appearing import appearing
from simreg_megatron.checkpoint.architecture import LARGEST, Architecture, check_weights, from_args
from simreg_megatron.checkpoint.errors import CheckpointError
from simreg_megatron.checkpoint.huggingface import Target, config_entries, config_of, targets
from simreg_megatron.checkpoint.source import Checkpoint
from simreg_megatron.checkpoint.tokenizer import Tokenizer
from simreg_megatron.checkpoint.vocabulary import check_size, check_tokenizer, size_of
from simreg_megatron.checkpoint.weights import EMBEDDING, Weight
from simreg_megatron.sentences import brief

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHARD_BYTES = 4 << 30

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True)
class Plan:
    """What will be written, known before anything is.

    Attributes:
        checkpoint: where from.
        architecture: the model's numbers.
        num_rows: the rows of the embedding with Megatron's padding.
        dtype: of the tensors to write.
        tokenizer: the one to write beside them, if any.
        notes: lines for the user.
    """

    checkpoint: Checkpoint
    architecture: Architecture
    num_rows: int
    dtype: torch.dtype
    tokenizer: Tokenizer | None
    notes: list[str]


def plan_export(
    checkpoint: Checkpoint,
    *,
    tokenizer: Tokenizer | None = None,
    dtype: str | None = None,
    vocabulary: int | None = None,
) -> Plan:
    """See that the checkpoint is one that can be exported, whole.

    Args:
        tokenizer: the one the model was trained with.
        dtype: "fp32", "bf16" or "fp16"; None for that of the checkpoint.
        vocabulary: tokens without padding; None to take it from the tokenizer or the checkpoint.

    Raises:
        CheckpointError: it cannot; the message says why.
    """
    notes = list(checkpoint.notes)
    args = checkpoint.args
    asked = vocabulary
    embedding = checkpoint.weights.get(EMBEDDING)
    vocabulary = vocabulary or size_of(args, tokenizer, (*embedding.shape, 0)[0] if embedding else 0)
    if vocabulary is None:
        vocabulary = args.get("padded_vocab_size")
        notes.append(
            f"the vocabulary keeps the rows that Megatron added ({brief(vocabulary)} in all): neither the checkpoint "
            "nor a tokenizer tells how many are real; give --tokenizer or --vocab-size to leave them out"
        )
    if not isinstance(vocabulary, int) or not 0 < vocabulary < LARGEST:
        raise CheckpointError("the checkpoint does not tell the size of its vocabulary: give --vocab-size")
    architecture = from_args(args, vocabulary=vocabulary)
    num_rows = check_weights(architecture, checkpoint.weights)
    if tokenizer is not None:
        check_size(args, tokenizer.size, num_rows, f"the tokenizer {tokenizer.path}")
        notes += check_tokenizer(args, checkpoint.folder, tokenizer)
        if tokenizer.size > vocabulary:
            raise CheckpointError(
                f"--vocab-size {asked} has no room for the {tokenizer.size} tokens of {tokenizer.path}: leave it out"
            )
    if asked is not None:
        check_size(args, asked, num_rows, f"--vocab-size {asked}")
    chosen = DTYPES[dtype] if dtype else checkpoint.weights[EMBEDDING].dtype
    wider = [name for name, weight in checkpoint.weights.items() if weight.dtype.itemsize > chosen.itemsize]
    if wider and dtype is None:
        notes.append(f"{len(wider)} weights are stored in a wider type and are rounded to {chosen}, such as {wider[0]}")
    if tokenizer is None and isinstance(args.get("tokenizer_model"), str):
        notes.append(f"no tokenizer is written; training used {args['tokenizer_model']}: name it with --tokenizer")
    if args.get("fp8") or args.get("fp4"):
        notes.append("it was trained with fp8 or fp4 products: the exported model computes in its own number type")
    if args.get("tokenizer_type") == "Llama2Tokenizer":
        notes.append(
            "it was trained with Llama2Tokenizer, which began every document with BOS up to Megatron 0.14: "
            "evaluate with add_bos_token as in your training"
        )
    return Plan(checkpoint, architecture, num_rows, chosen, tokenizer, notes)


def export(plan: Plan, save: Path, *, progress: Progress = lambda done, total: None) -> None:
    """Write the model to the folder `save`, which appears only when it is whole.

    Raises:
        CheckpointError: `save` is taken, or the checkpoint turns out to be damaged; nothing is left then.
    """
    with appearing(save) as folder:
        _write_tensors(plan, folder, progress)
        if plan.tokenizer is not None:
            plan.tokenizer.write(folder)
        _write_configuration(plan, folder)


def _write_tensors(plan: Plan, folder: Path, progress: Progress) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    shards = _shards(plan)
    total = sum(_size(target, plan.dtype) for shard in shards for target in shard)
    cut = _Cutter(plan.checkpoint.weights, plan.dtype)
    places, done = {}, 0
    for number, shard in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        for target in shard:
            tensors[target.name] = cut(target)
            places[target.name] = name
            done += _size(target, plan.dtype)
            progress(done, total)
        try:
            save_file(tensors, str(folder / name), metadata={"format": "pt"})
        except SafetensorError as error:  # its words for a full disk, too, after which nothing is left
            raise CheckpointError(
                f"{name} of {total} bytes in all cannot be written ({error}): free some space, or name another --save"
            ) from None
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        _write_json(folder / "model.safetensors.index.json", index)


def _shards(plan: Plan) -> list[list[Target]]:
    shards: list[list[Target]] = [[]]
    filled = 0
    for target in targets(plan.architecture):
        size = _size(target, plan.dtype)
        if shards[-1] and filled + size > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(target)
        filled += size
    return shards


def _size(target: Target, dtype: torch.dtype) -> int:
    return prod(target.shape) * dtype.itemsize


class _Cutter:
    """Cuts tensors out of weights; a weight is read once for all that come out of it."""

    def __init__(self, found: dict[str, Weight], dtype: torch.dtype) -> None:
        self._found, self._dtype = found, dtype
        self._source, self._weight = "", torch.empty(0)

    def __call__(self, target: Target) -> Tensor:
        if target.source != self._source:
            self._source, self._weight = target.source, self._found[target.source].read()
        tensor = target.cut(self._weight).to(self._dtype)
        assert tuple(tensor.shape) == target.shape, (target.name, tensor.shape, target.shape)
        if not torch.isfinite(tensor).all():
            raise CheckpointError(
                f"{target.name} holds NaN or infinite numbers: the run had diverged, or --dtype is too narrow"
            )
        # A part of a weight must not drag the whole of it into the file.
        return tensor.clone(memory_format=torch.contiguous_format)


def _write_configuration(plan: Plan, folder: Path) -> None:
    """Last, so that a folder without it can be told from a model at a glance."""
    import transformers

    tokenizer = plan.tokenizer
    bos, eos = (tokenizer.bos, tokenizer.eos) if tokenizer else (None, None)
    config = config_of(plan.architecture, bos=bos, eos=eos)
    transformers.GenerationConfig(bos_token_id=bos, eos_token_id=eos, pad_token_id=eos).save_pretrained(str(folder))
    _write_json(
        folder / "config.json", config_entries(plan.architecture, config, str(plan.dtype).removeprefix("torch."))
    )


def _write_json(path: Path, entries: Any) -> None:
    path.write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n")
