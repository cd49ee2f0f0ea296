# SPDX-License-Identifier: Apache-2.0
"""Check the tokenized text of a run before it starts: it is there and whole, and fits the model."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.flags import Flag, LaunchError, flag_name, flag_names, flag_number, flag_value
from simreg_megatron.tools.tokens import ENDINGS, MANIFEST, is_pair, read_index

_FLAGS = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")
_OF_CHATS = {"--sft", "--use-varlen-dataset"}  # files that Megatron tokenizes itself
_READ_HERE = {"SentencePieceTokenizer", "HuggingFaceTokenizer"}
_NUMBER = re.compile(r"(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_WRITE_SECONDS = 120  # in which a file grows that is being written
_AGAIN = "prepare the data again, or copy it again from where it was made"


def prefixes(flags: Sequence[Flag], names: Sequence[str] = _FLAGS) -> list[str]:
    """Return the prefixes that these flags name, without weights and those of a remote store; none of chats."""
    named: list[str] = []
    for flag in flags if not _OF_CHATS & flag_names(flags) else ():
        if flag_name(flag) in names:
            value = flag[0].partition("=")[2]
            words = [value, *flag[1:]] if value else flag[1:]
            has_weights = len(words) % 2 == 0 and all(map(_NUMBER.fullmatch, words[::2]))
            named += words[1::2] if has_weights else words
    return [prefix for prefix in named if "://" not in prefix]


def tokens_there(flags: Sequence[Flag]) -> int | None:
    """Return the number of tokens of the training text; None where the flags name none that this machine has."""
    texts = prefixes(flags, ("--data-path", "--train-data-path"))
    return sum(read_index(text).tokens for text in texts) if texts and all(map(is_pair, texts)) else None


def read_manifest(prefix: str) -> dict[str, Any]:
    """Return the manifest in the folder of a pair if it describes its .bin, else an empty one."""
    path = Path(prefix).parent / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        size = manifest["files"][f"{Path(prefix).name}.bin"]["bytes"]
        manifest["vocab_size"] = int(manifest.get("vocab_size", 0))
    except (OSError, ValueError, LookupError, TypeError, RecursionError):  # there is none, or it is another tool's
        return {}
    data = Path(f"{prefix}.bin")
    if data.is_file() and data.stat().st_size != size:
        raise LaunchError(f"{data} has {data.stat().st_size} bytes and {path} says {size}: {_AGAIN}")
    return dict(manifest)


def check_data(flags: Sequence[Flag]) -> list[str]:
    """Check the text of a run against its manifest, tokenizer and sizes, and return notices for the user."""
    notices: list[str] = []
    needed = flag_number(flags, "--seq-length", 1) + 1
    indices = {prefix: read_index(prefix) for prefix in prefixes(flags)}
    tokenizer = _hash_of_tokenizer(flags) if indices else None  # a name may be asked of the Hub, which takes time
    for named in filter(None, (prefixes(flags, (name,)) for name in _FLAGS)):
        if (tokens := sum(indices[prefix].tokens for prefix in named)) < needed:
            raise LaunchError(f"{named[0]}.bin has {tokens} tokens and one sample takes {needed}: give more text")
    for prefix in indices:
        manifest = read_manifest(prefix)
        if not manifest:
            notices.append(f"{prefix} has no {MANIFEST}: nothing shows which tokenizer made it")
        made_with = manifest.get("tokenizer_sha256")
        if tokenizer and made_with and made_with != tokenizer:
            raise LaunchError(
                f"{prefix} was made with another tokenizer ({manifest.get('tokenizer_name')}) than "
                f"{flag_value(flags, '--tokenizer-model')}: give the one the data was made with, or prepare it again"
            )
        size = manifest.get("vocab_size", 0)
        if flag_value(flags, "--vocab-size") and size > (given := flag_number(flags, "--vocab-size", 1)):
            raise LaunchError(
                f"{prefix} was made with {size} token ids and --vocab-size {given} has room for fewer: leave "
                "--vocab-size out, or prepare the data with the tokenizer of this model"
            )
    split = flag_value(flags, "--split")
    for prefix in prefixes(flags, ("--data-path",)) if split else ():
        _check_split(prefix, str(split))
    return notices[:1]  # one is enough for all texts


def _hash_of_tokenizer(flags: Sequence[Flag]) -> str | None:
    """Return what manifests have of the run's tokenizer; None for a kind that only Megatron reads."""
    source = flag_value(flags, "--tokenizer-model")
    if not source or flag_value(flags, "--tokenizer-type") not in _READ_HERE:
        return None
    from simreg_megatron.tools.tokens import load_tokenizer

    return load_tokenizer(source).sha256


def drop_unusable_indices(flags: Sequence[Flag]) -> list[str]:
    """Delete Megatron's sample indices that are older than their text, or cut off; return notices for the user.

    Megatron finds an index by the path of the text and the settings, and would train on these.

    Raises:
        LaunchError: one of them cannot be deleted.
    """
    notices, shared = [], flag_value(flags, "--data-cache-path")
    for prefix in dict.fromkeys(prefixes(flags)):
        changed = max(Path(f"{prefix}{ending}").stat().st_ctime for ending in ENDINGS)  # a copy may keep an old mtime
        folder = Path(shared) if shared else Path(prefix, "cache", "GPTDataset_indices")
        of_text = [path for path in folder.glob("*-description.txt") if json.dumps(prefix) in path.read_text()]
        for description in of_text:
            files = [*folder.glob(description.name.replace("description.txt", "*.npy")), description]
            if not any(path.stat().st_mtime < changed or (path != description and _is_cut_off(path)) for path in files):
                continue
            try:
                for path in files:
                    path.unlink(missing_ok=True)
            except OSError as error:
                raise LaunchError(
                    f"{error.filename} is older than {prefix}, or cut off, and cannot be deleted ({error.strerror}): "
                    "delete it, or give --data-cache-path FOLDER"
                ) from None
            notices.append(f"sample indices in {folder} are older than {prefix}, or cut off: they are made again")
    return list(dict.fromkeys(notices))


def _is_cut_off(path: Path) -> bool:
    """Return whether an index ends too early, and no other run is writing it."""
    import numpy as np

    try:
        np.load(path, mmap_mode="r")
    except (ValueError, EOFError):
        return time.time() - path.stat().st_mtime > _WRITE_SECONDS
    return False


def _check_split(prefix: str, split: str) -> None:
    """Refuse a split by documents that leaves a side empty: Megatron would look for a document without end."""
    documents = read_index(prefix).documents
    weights = [float(word) for word in re.findall(r"\d*\.?\d+", split)]  # as Megatron reads it: 98/2/0 as well
    total = sum(weights)
    if not total:
        raise LaunchError(f"--split takes weights of training, validation and test text, such as 99,1,0, not {split!r}")
    ends = [0, *(round(sum(weights[: side + 1]) / total * documents) for side in range(len(weights)))]
    for side, weight, begin, end in zip(("train", "validate", "test"), weights, ends, ends[1:], strict=False):
        if begin == end and (weight or side == "train"):
            raise LaunchError(
                f"{prefix} has {documents} documents, and --split {split} leaves none of them to {side}: give "
                "--valid-data PREFIX, text of its own, or --split 100,0,0 --eval-iters 0 to do without"
            )
