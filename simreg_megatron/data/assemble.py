# SPDX-License-Identifier: Apache-2.0
"""From parts to a set: all blocks in order, up to the budget, into .bin/.idx, and a manifest that says what they hold.

The manifest comes last, so a folder that has one is whole.
"""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simreg_megatron import __version__
from simreg_megatron.data.indexed import DataError, PairWriter, sync_folder
from simreg_megatron.data.parts import SIDES, PartHeader, PartStore, read_part
from simreg_megatron.data.settings import FORMAT, read_json, refuse_other, section, write_json

if TYPE_CHECKING:
    import numpy as np

MANIFEST = "manifest.json"
SETTINGS = "parts/settings.json"
SETS = ("train", "valid")  # of sources: the first may give both sides, the second the validation side only


def store_of(folder: Path, source_set: str) -> PartStore:
    return PartStore(folder / "parts" / source_set)


@dataclass
class _Totals:
    characters: int = 0
    empty: int = 0
    skipped: int = 0

    def add(self, header: PartHeader) -> None:
        self.characters += header.characters
        self.empty += header.empty
        self.skipped += header.skipped


def assemble(folder: Path, *, budget: Mapping[str, int | None] | None = None) -> dict[str, Any]:
    """Write the set of a folder's parts, then remove the parts.

    Args:
        folder: where `prepare` put them, of one machine or of several.
        budget: the most training and validation tokens; for a side without a number as when they were made.

    Returns:
        The manifest.

    Raises:
        DataError: parts are missing or damaged; nothing is lost.
    """
    done = read_json(folder / MANIFEST)
    settings = read_json(folder / SETTINGS)
    if done is not None:
        if settings is not None:
            own, asked = section(done, "settings", folder / MANIFEST), section(settings, "settings", folder / SETTINGS)
            refuse_other(own, asked, folder)
        remove_parts(folder)
        return done
    if settings is None:
        raise DataError(f"{folder} has no parts: `simreg-megatron data prepare --shard i/n` makes them")
    try:
        return _assemble(folder, settings, budget)
    except DataError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise DataError(
            f"{folder / SETTINGS} or a part beside it is not what this program writes ({type(error).__name__}: "
            f"{error}): copy the folder again from where it was made, or prepare the data again in another"
        ) from None


def _assemble(folder: Path, settings: dict[str, Any], budget: Mapping[str, int | None] | None) -> dict[str, Any]:
    limits = settings["budget"] | {side: most for side, most in (budget or {}).items() if most is not None}
    writers = {side: PairWriter(folder / side, settings["dtype"]) for side in SIDES}
    totals = _Totals()
    examples: list[str] = []
    try:
        for source_set in SETS:
            for header, arrays in _parts_in_order(folder, source_set, settings, limits):
                totals.add(header)
                examples += header.skipped_where[: 20 - len(examples)]
                if not _append(writers, arrays, limits, source_set):
                    break
        manifest = _manifest(settings, limits, writers, totals, examples)
        files = {}
        for side, writer in writers.items():
            if writer.num_tokens:
                for ending, digest in writer.commit().items():
                    files[f"{side}{ending}"] = asdict(digest)
    finally:
        for writer in writers.values():
            writer.abandon()
    if not files:
        raise DataError(f"the sources of {folder} hold no text: see {folder / SETTINGS} for what was read")
    sync_folder(folder)
    manifest["files"] = files
    write_json(folder / MANIFEST, manifest)
    remove_parts(folder)
    return manifest


def remove_parts(folder: Path) -> None:
    shutil.rmtree(folder / "parts", ignore_errors=True)


def _append(
    writers: Mapping[str, PairWriter], arrays: Mapping[str, np.ndarray], limits: Mapping[str, Any], source_set: str
) -> bool:
    """Add a part; False once the set's own side has reached its limit, at the end of a document."""
    import numpy as np

    goes_on = True
    for side in SIDES:
        lengths, tokens = arrays[f"{side}_lengths"], arrays[f"{side}_tokens"]
        # Sources given for validation alone make no training text: their parts hold one side, called train.
        writer = writers[side if source_set == "train" else "valid"]
        limit = limits.get(source_set)
        if side == "train" and limit is not None:
            ends = np.cumsum(lengths, dtype=np.int64) + writer.num_tokens
            if len(ends) and ends[-1] >= limit:
                count = int(np.searchsorted(ends, limit)) + 1  # up to the document that reaches it
                lengths, tokens = lengths[:count], tokens[: int(ends[count - 1]) - writer.num_tokens]
                goes_on = False
        writer.append(tokens, lengths)
    return goes_on


def _parts_in_order(
    folder: Path, source_set: str, settings: Mapping[str, Any], limits: Mapping[str, Any]
) -> Iterator[tuple[PartHeader, dict[str, np.ndarray]]]:
    store = store_of(folder, source_set)
    for number, source in enumerate(settings["settings"][f"{source_set}_sources"]):
        block = 0
        while True:
            if not store.has(number, block):
                raise DataError(_missing(folder, source["name"], block, limits))
            header, arrays = read_part(store.path(number, block))
            yield header, arrays
            if header.is_last:
                break
            block += 1


def _missing(folder: Path, name: str, block: int, limits: Mapping[str, Any]) -> str:
    budget = (
        ""
        if limits.get("train") is None
        else (
            f"; where every shard has ended, give that one --tokens above {limits['train']}, and `data merge` the same"
        )
    )
    return (
        f"block {block} of {name} is not among the parts in {folder}: run the shard that makes it again (it resumes "
        f"where it stopped), and bring the parts of every machine into this one folder{budget}"
    )


def _manifest(
    settings: Mapping[str, Any],
    limits: Mapping[str, Any],
    writers: Mapping[str, PairWriter],
    totals: _Totals,
    examples: Sequence[str],
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "made_by": f"simreg-megatron {__version__}",
        "documents": {side: writer.num_documents for side, writer in writers.items()},
        "tokens": {side: writer.num_tokens for side, writer in writers.items()},
        "read": {**asdict(totals), "skipped_where": list(examples)},
        "dtype": settings["dtype"],
        "vocab_size": settings["settings"]["tokenizer"]["vocab_size"],
        "eos_id": settings["settings"]["tokenizer"]["eos_id"],
        "bos_id": settings["settings"]["tokenizer"]["bos_id"],
        "tokenizer_name": settings["tokenizer_name"],
        "tokenizer_sha256": settings["settings"]["tokenizer"]["sha256"],
        "budget": dict(limits),
        "settings": settings["settings"],
        "libraries": {name: _version(name) for name in ("sentencepiece", "tokenizers", "transformers")},
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
