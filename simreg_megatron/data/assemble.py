# SPDX-License-Identifier: Apache-2.0
"""From parts to a set: all blocks in order, up to the budget, into .bin/.idx, and a manifest that says what they hold.

The manifest comes last, so a folder that has one is whole.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simreg_megatron import __version__
from simreg_megatron.data.indexed import DataError, PairWriter, sync_folder
from simreg_megatron.data.parts import SIDES, PartHeader, PartStore, remove_if_empty
from simreg_megatron.data.settings import (
    FORMAT,
    OLDER,
    fingerprint,
    read_json,
    refuse_older,
    refuse_other,
    section,
    write_json,
)

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
    with alone(folder, "assemble"):  # `prepare` and `merge` both come here, and a set that has just been made is done
        return _joined(folder, budget)


def _joined(folder: Path, budget: Mapping[str, int | None] | None) -> dict[str, Any]:
    done = read_json(folder / MANIFEST)
    settings = read_json(folder / SETTINGS)
    if done is not None:
        _refuse_foreign(done, folder / MANIFEST)
        refuse_other(done["budget"], done["budget"] | _given(budget), folder)
        if settings is not None:
            refuse_other(done["settings"], section(settings, "settings", folder / SETTINGS), folder)
            remove_parts(folder)
        return done
    if settings is None:
        raise DataError(f"{folder} has no parts: `simreg-megatron data prepare --shard i/n` makes them")
    refuse_older(section(settings, "settings", folder / SETTINGS), (folder / SETTINGS).parent)
    try:
        return _assemble(folder, settings, budget)
    except DataError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(
            f"{folder / SETTINGS} or a part beside it is not what this program writes ({type(error).__name__}: "
            f"{error}): copy the folder again from where it was made, or prepare the data again in another"
        ) from None


def _assemble(folder: Path, settings: dict[str, Any], budget: Mapping[str, int | None] | None) -> dict[str, Any]:
    limits = settings["budget"] | _given(budget)
    _remove_unfinished(folder)
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


@contextmanager
def alone(folder: Path, what: str) -> Iterator[None]:
    """Nobody else does this in the folder meanwhile.

    Raises:
        DataError: somebody does.
    """
    from filelock import FileLock, Timeout

    try:
        with FileLock(folder / f".prepare-{what}.lock", timeout=0):
            yield
    except Timeout as error:
        raise DataError(
            f"another process is preparing this data set in {folder}: wait for it, or stop it; where none is at work "
            f"on any machine, remove {error.lock_file}"
        ) from None


def _remove_unfinished(folder: Path) -> None:
    """What was written before a kill: without a manifest it counts for nothing, and takes the room of a set."""
    for side in SIDES:
        for ending in (".bin", ".idx"):
            for path in (folder / f"{side}{ending}", *folder.glob(f"{side}{ending}.writing-*")):
                path.unlink(missing_ok=True)


def remove_parts(folder: Path) -> None:
    """Take away the parts, and the folders that are empty then: whatever else lies there is its owner's."""
    for source_set in SETS:
        store_of(folder, source_set).clear()
    settings = folder / SETTINGS  # after the parts: without it they are no longer known as ours
    for path in (settings, *settings.parent.glob(f"{settings.name}.writing-*"), *folder.glob(f"{MANIFEST}.writing-*")):
        path.unlink(missing_ok=True)
    remove_if_empty(settings.parent)


def _given(budget: Mapping[str, int | None] | None) -> dict[str, int]:
    return {side: most for side, most in (budget or {}).items() if most is not None}


def _refuse_foreign(manifest: Mapping[str, Any], path: Path) -> None:
    """Another tool's manifest says nothing about the parts beside it."""
    counts = [section(manifest, name, path).get(side) for name in ("documents", "tokens") for side in SIDES]
    tables = all(section(manifest, name, path) for name in ("files", "settings", "budget"))
    known = manifest.get("format") in (OLDER, FORMAT) and all(isinstance(count, int) for count in counts)
    if not (known and tables and set(SIDES) <= set(manifest["budget"])):
        raise DataError(f"{path} is not what this program writes: name another folder, or move that file away")


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
        block, made_with = 0, fingerprint(settings["settings"], source)
        while True:
            if not store.has(number, block):
                raise DataError(_missing(folder, source["name"], block, limits))
            header, arrays = store.read(number, block, made_with)
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
