# SPDX-License-Identifier: Apache-2.0
"""Read a `torch_dist` checkpoint of a test's own run by torch's reader, without Megatron's model."""

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

_NOT_THE_MODEL = ("optimizer.", "chained_")


def tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors but the optimizer's, by Megatron's keys; NaN where the file has a gap."""
    reader = dcp.FileSystemReader(folder)
    found = {
        key: torch.full(entry.size, torch.nan, dtype=torch.float64).to(entry.properties.dtype)
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and not key.startswith(_NOT_THE_MODEL)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.load(found, storage_reader=reader)
    return found


def objects(folder: Path) -> set[str]:
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {key for key, entry in entries.items() if not isinstance(entry, TensorStorageMetadata)}
