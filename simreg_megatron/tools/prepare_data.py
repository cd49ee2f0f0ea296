# SPDX-License-Identifier: Apache-2.0
"""`simreg-megatron data prepare`: from text to Megatron's .bin/.idx.

Hugging Face `datasets` reads the text, tokenizes it in several processes, and keeps in OUT/cache what is done: the same
command continues after it was stopped. The files of the set get their names when all of them are whole.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from simreg_megatron import __version__
from simreg_megatron.tools import builtin_corpus
from simreg_megatron.tools.indexed import (
    ENDINGS,
    MANIFEST,
    DataError,
    PairWriter,
    describe_files,
    find_changed,
    publish,
)
from simreg_megatron.tools.text_sources import READABLE, Group, file_bytes, find_groups, load_group, texts_of
from simreg_megatron.tools.tokenizers import Tokenizer, load_tokenizer, train_tokenizer

_SAMPLE_CHARACTERS, _SAMPLE_GROUPS = 6_000_000, 16


def add_command(commands: Any) -> None:
    text = "prepare text for training"
    data = commands.add_parser("data", help=text, description=text).add_subparsers(metavar="COMMAND", required=True)
    builtin_corpus.add_command(data)
    text = "tokenize text into training and validation sets; the same command continues after it was stopped"
    parser = data.add_parser("prepare", help=text, description=text)
    add, one_of = parser.add_argument, parser.add_mutually_exclusive_group(required=True).add_argument
    of_validation = parser.add_mutually_exclusive_group().add_argument
    add("sources", nargs="+", metavar="SOURCE", help=f"{READABLE}; a .txt is one document")
    add("--out", type=Path, required=True, help="folder for train and valid .bin/.idx, and manifest.json")
    one_of("--tokenizer", help="a sentencepiece .model file, or a Hugging Face folder or name")
    one_of("--train-tokenizer", type=_count, metavar="N", help="train one of N pieces: OUT/tokenizer.model")
    add("--key", default="text", help="the key or column that has the text (default: text)")
    of_validation("--valid", action="append", metavar="SOURCE", help="for validation alone; may be repeated")
    of_validation("--valid-share", type=float, help="share of the documents (default: 0.005)")
    add("--tokens", type=_count, help="training tokens, such as 20B or 500M: ends with the document that reaches them")
    add("--valid-tokens", type=_count, help="the same for the --valid sources")
    add("--workers", type=_count, default=len(os.sched_getaffinity(0)), help="processes (default: cores)")
    parser.set_defaults(run=run)


def _count(text: str) -> int:
    """Read 20B, 500M, 32K or 4096."""
    unit = "_KMBT".find(text[-1:].upper())
    return round(float(text[:-1]) * 1000**unit if unit > 0 else float(text))


def run(options: argparse.Namespace) -> None:
    manifest = prepare(**{name: value for name, value in vars(options).items() if name != "run"})
    for side, limit in (("train", options.tokens), ("valid", options.valid_tokens)):
        tokens = manifest["tokens"][side]
        print(f"{options.out / side}: {tokens:,} tokens, {manifest['documents'][side]:,} documents")
        if limit and tokens < limit:
            print(f"notice: that is all there is; {limit:,} tokens were asked for")
    if not manifest["tokens"]["valid"]:
        print("notice: there is no validation set: give --valid SOURCE or a larger --valid-share with another --out")


def prepare(
    sources: Sequence[str],
    out: Path,
    *,
    tokenizer: str | None = None,
    train_tokenizer: int | None = None,
    key: str = "text",
    valid: Sequence[str] | None = None,
    valid_share: float | None = None,
    tokens: int | None = None,
    valid_tokens: int | None = None,
    workers: int = 1,
) -> dict[str, Any]:
    """Make a set in the folder `out`, or find it there, and return its manifest; the arguments are the options."""
    import datasets
    from filelock import FileLock

    if list(sources) == ["c4"] and not valid and valid_share is None:
        valid = ["c4"]
    groups = {"valid": find_groups(valid or (), key, "validation")}
    apart = {os.path.realpath(name) for group in groups["valid"] for name in group.files}
    groups["train"] = find_groups(sources, key, "train", leave_out=apart)
    files = {side: [name for group in found for name in group.files] for side, found in groups.items()}
    loaded = load_tokenizer(tokenizer) if tokenizer is not None else None
    settings: dict[str, Any] = {
        **{side: [[name, file_bytes(name)] for name in names] for side, names in files.items()},
        "tokenizer": loaded.sha256 if loaded else train_tokenizer,
        "key": key,
        "valid_share": (0.0 if valid else 0.005) if valid_share is None else valid_share,
        "tokens": tokens,
        "valid_tokens": valid_tokens,
    }
    if (out / MANIFEST).exists():
        return _finished(out, settings)
    if there := [f"{side}{ending}" for side in groups for ending in ENDINGS if (out / f"{side}{ending}").exists()]:
        raise DataError(f"{out / there[0]} is there without a {MANIFEST}: give another --out, or move it away")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process, one core
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its errors come as exceptions as well
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    cache = out / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "lock", timeout=0):  # one process prepares a set
        loaded = loaded or _train_on_sample(groups["train"], int(train_tokenizer or 0), cache)
        manifest = _write_pairs(groups, loaded, settings, cache, workers)
        publish(cache, out, manifest)
    return manifest


def _finished(out: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest of a finished set, if it was made with the same settings and its files are there."""
    manifest: dict[str, Any] = json.loads((out / MANIFEST).read_text())
    made_with = manifest.get("settings", {})
    if differ := [name for name, value in settings.items() if made_with.get(name) != value]:
        raise DataError(f"{out} has a set of other settings ({differ[0]} differs): give another --out, or remove it")
    if changed := find_changed(out, manifest):
        raise DataError(f"{changed} is not the file that {MANIFEST} describes: remove {out}, and prepare it again")
    return manifest


def _train_on_sample(groups: list[Group], vocab_size: int, cache: Path) -> Tokenizer:
    """Train a tokenizer on random documents of up to 16 groups, the same in every run."""
    chosen = groups[:: -(-len(groups) // _SAMPLE_GROUPS)]
    texts: list[str] = []
    for group in chosen:
        left = _SAMPLE_CHARACTERS // len(chosen)
        for rows in load_group(group, cache).shuffle(seed=0).iter(batch_size=1):
            some = texts_of(group, rows)
            texts += some
            left -= sum(map(len, some))
            if left <= 0:
                break
    train_tokenizer(texts, cache / "tokenizer.model", vocab_size=vocab_size, longest_line=1 << 16)
    return load_tokenizer(str(cache / "tokenizer.model"))


def _write_pairs(
    groups: dict[str, list[Group]], tokenizer: Tokenizer, settings: dict[str, Any], cache: Path, workers: int
) -> dict[str, Any]:
    """Write the pairs into `cache`, and return the manifest."""
    writers = {side: PairWriter(cache / side, tokenizer.vocab_size) for side in ("train", "valid")}
    for side, limit in (("train", settings["tokens"]), ("valid", settings["valid_tokens"])):
        share = settings["valid_share"] if side == "train" else 0.0
        for ids, is_valid in _documents(groups[side], tokenizer, share, cache, workers):
            writers["valid" if is_valid else side].add(ids)
            if limit and writers[side].tokens >= limit:
                break
    for writer in writers.values():
        writer.close()
    if not writers["train"].tokens:
        raise DataError(f"there is no text for training in {', '.join(group.name for group in groups['train'])}")
    names = [f"{side}{ending}" for side, writer in writers.items() if writer.tokens for ending in ENDINGS]
    names += ["tokenizer.model"] if Path(tokenizer.source).parent == cache else []
    return {
        "made_by": f"simreg-megatron {__version__}",
        "documents": {side: writer.documents for side, writer in writers.items()},
        "tokens": {side: writer.tokens for side, writer in writers.items()},
        **tokenizer.describe(),
        "settings": settings,
        "files": describe_files(cache, names),
    }


def _documents(
    groups: list[Group], tokenizer: Tokenizer, share: float, cache: Path, workers: int
) -> Iterator[tuple[Any, bool]]:
    """Yield the ids of each document, end-of-text included, and whether it is for validation."""
    from datasets import Features, Sequence, Value
    from multiprocess import TimeoutError

    for group in groups:
        print(f"> {group.name}", flush=True)
        data = load_group(group, cache)
        try:
            encoded = data.map(
                _encode, batched=True, batch_size=200, num_proc=workers if workers > 1 else None,
                remove_columns=data.column_names,
                features=Features({"ids": Sequence(Value(tokenizer.dtype)), "valid": Value("bool")}),
                fn_kwargs={"group": group, "tokenizer": (tokenizer.source, tokenizer.sha256), "share": share},
            )  # fmt: skip
        except TimeoutError as error:  # Ctrl-C, and then datasets has no patience with its workers
            raise error.__context__ or error from None
        for table in encoded.with_format("arrow").iter(batch_size=1000):
            for ids, is_valid in zip(table["ids"], table["valid"], strict=True):
                yield ids.values.to_numpy(), is_valid.as_py()


def _encode(rows: dict[str, list[Any]], *, group: Group, tokenizer: tuple[str, str], share: float) -> dict[str, Any]:
    """Tokenize some rows. `datasets` finds earlier results by the arguments: the tokenizer's hash is one of them."""
    texts = texts_of(group, rows)
    loaded = _load_once(*tokenizer)
    ids = [[*found, loaded.eos_id] if found else [] for found in loaded.encode(texts)]
    return {"ids": ids, "valid": [_is_validation(text, share) for text in texts]}


@lru_cache(maxsize=1)
def _load_once(source: str, sha256: str) -> Tokenizer:
    """Load the tokenizer once in a process, which takes seconds; the file may be another one later."""
    return load_tokenizer(source)


def _is_validation(text: str, share: float) -> bool:
    """Decide by a hash of the text, so that a document stays on its side when others come, and duplicates with it."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64
