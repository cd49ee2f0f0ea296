# SPDX-License-Identifier: Apache-2.0
"""Inputs that every release shares, made by the reference: `python -m tests.versions.inputs CORE CORPUS OUT`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

CHUNK = 24  # does not divide the length: the last chunk is shorter
_SPREAD = 8.0  # from Megatron's initial scale to one at which attention and logits are not flat


def main() -> None:
    core, corpus, out = (Path(word) for word in sys.argv[1:])
    from tests.versions.driver import use_only

    use_only(core)
    from simreg_megatron.cpu import backend as cpu_backend

    cpu_backend.activate()
    from tests.megatron.text import VOCABULARY, make_corpus
    from tests.versions import tiny

    made = make_corpus(corpus)
    shape = (tiny.MICRO_BATCHES, tiny.MICRO_BATCH, tiny.LENGTH)
    tiny.start(tiny.Layout())
    tiny_weights = tiny.make_weights(VOCABULARY)
    torch.save(
        {
            "weights": {name: _spread(weight) for name, weight in tiny_weights.items()},
            "tokens": _tokens(made.train_prefix, shape),
            "mask": _mask(shape),
            "vocabulary": VOCABULARY,
            "chunk": CHUNK,
        },
        out,
    )


def _spread(weight: torch.Tensor) -> torch.Tensor:
    return weight * _SPREAD if weight.dim() > 1 else weight


def _tokens(prefix: Path, shape: tuple[int, int, int]) -> torch.Tensor:
    """Consecutive text, cut into sequences of S + 1 tokens."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset, (batches, rows, length) = IndexedDataset(str(prefix)), shape
    tokens = torch.cat([torch.from_numpy(dataset[index].astype("int64")) for index in range(len(dataset))])
    return tokens[: batches * rows * (length + 1)].view(batches, rows, length + 1)


def _mask(shape: tuple[int, int, int]) -> torch.Tensor:
    """About an eighth of the tokens masked, more of them from micro-batch to micro-batch."""
    share = torch.linspace(0.05, 0.25, shape[0])[:, None, None]
    return (torch.rand(shape, generator=torch.Generator().manual_seed(3)) > share).float()


if __name__ == "__main__":
    main()
