# SPDX-License-Identifier: Apache-2.0
"""Data sets of the Hugging Face Hub: streamed, all of a set at one commit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from simreg_megatron.data.blocks import Block, TextsBlock, Wanted
from simreg_megatron.data.indexed import DataError

HUB = "hf:"


@dataclass(frozen=True)
class HubFile:
    """One file of a data set of the Hub, as `datasets` counts them: streamed, never stored whole.

    Attributes:
        revision: the commit that all files of the set are read at, whatever happens to the set meanwhile.
    """

    source: str
    split: str
    revision: str
    index: int
    count: int
    size = 1
    shared = False
    files = ()

    @property
    def name(self) -> str:
        return f"{self.source} {self.split} {self.index + 1}/{self.count}"

    def blocks(self, size: int, wanted: Wanted) -> Iterator[Block]:
        number = length = 0
        rows: list[Any] = []
        first = 1
        for row in self._rows():
            if length >= size:
                if wanted(number):
                    yield TextsBlock(number, False, 0, self.name, tuple(rows), first)
                first += len(rows)
                number, length, rows = number + 1, 0, []
            rows.append(row)
            length += sum(len(value) for value in row.values() if isinstance(value, str))
        if wanted(number):
            yield TextsBlock(number, True, self.size, self.name, tuple(rows), first)

    def _rows(self) -> Iterator[Any]:
        try:
            stream, _ = open_hub(self.source, self.split, self.revision)
            yield from stream.shard(num_shards=self.count, index=self.index)
        except DataError:
            raise
        except Exception as error:  # the network's, of many kinds
            raise DataError(
                f"the stream of {self.name} broke off ({type(error).__name__}: {' '.join(str(error).split())}): give "
                "the same command again, and it resumes in this file"
            ) from None

    def identity(self) -> dict[str, Any]:
        return {"name": self.name, "revision": self.revision}


def open_hub(source: str, split: str, revision: str = "") -> tuple[Any, str]:
    """The stream of `hf:NAME` or `hf:NAME:CONFIGURATION`, and the commit of the Hub that it is read at.

    Args:
        revision: a commit, branch or tag; empty for the newest.

    Raises:
        DataError: it is not there, or cannot be reached.
    """
    name, _, configuration = source.removeprefix(HUB).partition(":")
    try:
        import datasets

        datasets.config.HF_DATASETS_TRUST_REMOTE_CODE = False  # releases before 4 would ask whether to run a set's code
        builder = datasets.load_dataset_builder(name, configuration or None, revision=revision or None)
        return builder.as_streaming_dataset(split=split), str(builder.hash)
    except ImportError:
        raise DataError("data sets of the Hub need the datasets library: pip install datasets") from None
    except Exception as error:  # of many kinds: the network's, the Hub's, the library's own
        raise DataError(
            f"{source} ({split}) cannot be opened ({type(error).__name__}: {' '.join(str(error).split())}): check "
            f"the name and the network, or download its files and name the folder"
        ) from None
