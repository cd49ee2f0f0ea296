# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.fuzz.attacks`: inputs that people thought of, each of which broke a reader before it was mended.

They are kept among the regressions beside those that the fuzzer found, under the name of what they do.
"""

from __future__ import annotations

import io
import itertools
import json
import pickle
import zipfile
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.fuzz.readers import checkpoints
from tests.fuzz.target import REGRESSIONS

_NORM = "decoder.layers.input_layernorm.weight"
_MANY = 1 << 40


def main() -> None:
    for target, name, content in _attacks():
        (REGRESSIONS / target).mkdir(parents=True, exist_ok=True)
        (REGRESSIONS / target / name).write_bytes(content)
        print(f"{target}/{name}: {len(content):,} bytes")


def _attacks() -> Iterator[tuple[str, str, bytes]]:
    yield "metadata", "place-for-67-million-objects", b"\x80\x04]r\xff\xff\xff\x01."
    yield "metadata", "layers-without-numbers", _metadata((_MANY, 0), chunks=False)
    yield "metadata", "more-layers-than-bytes", _metadata((3_000_000, 1), chunks=True)
    yield "common-pickle", "bytearray-of-256-MiB", b"\x80\x02cbuiltins\nbytearray\nJ\x00\x00\x00\x10\x85R."
    yield "common", "compressed", _compressed(80 << 20)
    yield "rank-pickle", "ranks-without-end", _ranks(tensor_model_parallel_size=100_000_000)
    yield "rank-pickle", "no-heads", _ranks(num_attention_heads=0, kv_channels=None)
    yield "rank-pickle", "tensor-as-a-setting", _ranks(normalization=torch.zeros(2))
    yield "tracker", "step-of-5000-digits", b"9" * 5000
    yield "tracker", "step-longer-than-a-name", b"1" * 300
    yield "hf-config", "deep", b"[" * 20_000
    yield "hf-index", "no-table", b'{"weight_map": ["model.safetensors"]}'
    yield "plan-yaml", "merges", _merges()
    yield "plan-yaml", "aliases", _aliases()
    yield "plan-yaml", "combinations", _combinations()
    yield "plan-yaml", "date-of-no-day", b"2001-99-99"
    yield "plan-yaml", "half-a-word", b'name: x\nquestion: "\\ud800"\narms: {a: {trials: {lr: 3}}}\n'
    yield "plan-yaml", "flag-of-a-number", b"name: x\nquestion: y\narms: {a: {flags: [1]}}\n"
    yield "plan-yaml", "seeds-of-words", b"name: x\nquestion: y\nseeds: three\narms: {a: {}}\n"
    yield (
        "plan-json",
        "seeds-without-end",
        json.dumps({"name": "small", "question": "?", "arms": {"plain": {}}, "seeds": 10**7, "sizes": [64]}).encode(),
    )
    yield "cluster-env", "number-of-5000-digits", b"GPUS_PER_NODE=" + b"9" * 5000
    yield "run-csv", "step-beyond-64-bits", b"tag,step,value\nlm loss,99999999999999999999,1\n"
    yield "run-csv", "more-cells-than-heads", b"step,lm loss\n1,2,3\n"


def _metadata(shape: tuple[int, ...], *, chunks: bool) -> bytes:
    entry: Any = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(shape), [])
    places: dict[Any, Any] = {}
    if chunks:
        entry.chunks.append(ChunkStorageMetadata(torch.Size((0, 0)), torch.Size(shape)))
        places[MetadataIndex(_NORM, torch.Size((0, 0)))] = _StorageInfo("__0_0.distcp", 0, 10)
    return pickle.dumps(Metadata(state_dict_metadata={_NORM: entry}, storage_data=places))


def _compressed(size: int) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("common/data.pkl", b"\x80\x02X" + size.to_bytes(4, "little") + bytes(size) + b".")
        made.writestr("common/version", "3\n")
    return archive.getvalue()


def _ranks(**settings: Any) -> bytes:
    content: dict[str, Any] = checkpoints.rank_content()
    vars(content["args"]).update(settings)
    return checkpoints.pickle_in(checkpoints.archive_of(content))


def _merges() -> bytes:
    """Each mapping takes over the one before nine times."""
    names = "abcdefgh"
    lines = ["a: &a {x: 1}"]
    for before, name in itertools.pairwise(names):
        lines.append(f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 9)}]}}")
    return "\n".join(lines).encode()


def _aliases() -> bytes:
    """A flag whose text is nine times nine times ... a list."""
    lines = ["name: x", "question: y", "source:", "  - &a [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"  - &{name} [{', '.join([f'*{chr(ord(name) - 1)}'] * 9)}]" for name in "bcdefgh"]
    return "\n".join([*lines, "arms: {one: {flags: {lr: *h}}}"]).encode()


def _combinations() -> bytes:
    values = ", ".join(map(str, range(10)))
    flags = "".join(f"\n      flag-{number}: [{values}]" for number in range(9))
    return f"name: x\nquestion: y\narms:\n  one:\n    trials:{flags}\n".encode()


if __name__ == "__main__":
    main()
