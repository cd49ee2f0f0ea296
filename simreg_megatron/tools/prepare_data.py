# SPDX-License-Identifier: Apache-2.0
"""`simreg-megatron data prepare`: from text to Megatron's .bin/.idx.

Hugging Face `datasets` reads the text, tokenizes it in several processes, and keeps in OUT/cache what is done. Files of
the set get their names when all are whole. JSON is read as lines: `datasets` would want one type for every key.
"""

import argparse
import glob
import hashlib
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence, Set
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from simreg_megatron.tools import builtin_corpus, tokens
from simreg_megatron.tools.tokens import ENDINGS, MANIFEST, DataError, Tokenizer, find_changed, load_tokenizer, publish

READABLE = "a .jsonl, .jsonl.gz, .jsonl.zst, .parquet or .txt file, a folder of them, hf:NAME, or c4 (of the Hub)"
_KINDS = {".jsonl": "line", ".ndjson": "line", ".json": "line", ".parquet": "parquet", ".txt": "document"}
_GROUP_BYTES = 1 << 30
_SAMPLE_CHARACTERS, _SAMPLE_GROUPS = 6_000_000, 16


_load_once = lru_cache(maxsize=1)(lambda source, sha256: load_tokenizer(source))  # the file may change, and its hash


class Group(NamedTuple):
    """Files of one kind that are read and tokenized together."""

    kind: str
    files: list[str]
    key: str

    @property
    def name(self) -> str:
        return self.files[0] if len(self.files) == 1 else f"{self.files[0]} and {len(self.files) - 1:,} more"


def add_command(commands: Any) -> None:
    text = "prepare text for training"
    data = commands.add_parser("data", help=text, description=text).add_subparsers(metavar="COMMAND", required=True)
    text = "build the demo's corpus from the documentation of this machine's Python libraries; another text elsewhere"
    parser = data.add_parser("corpus-builtin", help=text, description=text)
    parser.add_argument("--out", type=Path, default=Path("data/builtin"), help="folder of the set")
    parser.set_defaults(run=builtin_corpus.run)
    text = "tokenize text into training and validation sets; the same command continues after it was stopped"
    parser = data.add_parser("prepare", help=text, description=text)
    add, one_of = parser.add_argument, parser.add_mutually_exclusive_group(required=True).add_argument
    of_validation = parser.add_mutually_exclusive_group().add_argument
    add("sources", nargs="+", metavar="SOURCE", help=f"{READABLE}; a .txt is one document")
    add("--out", type=Path, required=True, help="folder for train and valid .bin/.idx, and manifest.json")
    one_of("--tokenizer", help="a sentencepiece .model file, or a Hugging Face folder or name")
    one_of("--train-tokenizer", type=count, metavar="N", help="train one of N pieces: OUT/tokenizer.model")
    add("--key", default="text", help="the key or column that has the text (default: text)")
    of_validation("--valid", action="append", metavar="SOURCE", help="for validation alone; may be repeated")
    of_validation("--valid-share", type=float, help="share of the documents (default: 0.005)")
    add("--tokens", type=count, help="training tokens, such as 20B or 500M: ends with the document that reaches them")
    add("--valid-tokens", type=count, help="the same for the --valid sources")
    add("--workers", type=count, default=len(os.sched_getaffinity(0)), help="processes (default: cores)")
    parser.set_defaults(run=run)


def count(text: str) -> int:
    unit = "_KMBT".find(text[-1:].upper())  # of 20B, 500M or 32K
    number = float(text[:-1]) * 1000**unit if unit > 0 else float(text)
    if not 1 <= number < math.inf:
        raise ValueError
    return round(number)


def run(options: argparse.Namespace) -> None:
    manifest = prepare(**{name: value for name, value in vars(options).items() if name != "run"})
    for side, number in manifest["tokens"].items():
        lacks = not number and options.valid_share != 0
        way_out = ", so train with --valid-data of another set, or prepare again with --valid SOURCE" if lacks else ""
        print(f"{options.out / side}: {number:,} tokens, {manifest['documents'][side]:,} documents{way_out}")


def prepare(
    sources: Sequence[str], out: Path, *, tokenizer: str | None = None, train_tokenizer: int | None = None,
    key: str = "text", valid: Sequence[str] | None = None, valid_share: float | None = None,
    tokens: int | None = None, valid_tokens: int | None = None, workers: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """Make a set in the folder `out`, or find it there, and return its manifest; the arguments are the options."""
    import datasets
    from filelock import FileLock, Timeout

    if list(sources) == ["c4"] and not valid and valid_share is None:
        valid = ["c4"]
    if valid_tokens and not valid:
        raise DataError("--valid-tokens has no effect without --valid: name the texts for validation, or drop it")
    groups = {"valid": find_groups(valid or (), key, "validation")}
    validation_files = {os.path.realpath(name) for group in groups["valid"] for name in group.files}
    groups["train"] = find_groups(sources, key, "train", leave_out=validation_files)
    loaded = load_tokenizer(tokenizer) if tokenizer is not None else None
    settings: dict[str, Any] = {
        **{side: [[name, file_bytes(name)] for group in each for name in group.files] for side, each in groups.items()},
        "tokenizer": loaded.sha256 if loaded else train_tokenizer,
        "valid_share": (0.0 if valid else 0.005) if valid_share is None else valid_share,
        "key": key, "tokens": tokens, "valid_tokens": valid_tokens,
    }  # fmt: skip
    if (out / MANIFEST).exists():
        manifest: dict[str, Any] = json.loads((out / MANIFEST).read_text())
        if manifest.get("settings") != settings:
            raise DataError(f"{out} has a set of other settings or sources: give another --out, or remove it")
        if changed := find_changed(out, manifest):
            raise DataError(f"{changed} is not the file that {MANIFEST} describes: remove {out} and repeat")
        return manifest
    for file in (out / f"{side}{ending}" for side in groups for ending in ENDINGS):
        if file.exists():
            raise DataError(f"{file} is there without a {MANIFEST}: give another --out, or move it away")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process, one core
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its errors come as exceptions as well
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    (cache := out / "cache").mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(cache / "lock", timeout=0):
            loaded = loaded or _train_on_sample(groups["train"], int(train_tokenizer or 0), cache)
            names, counts = _write_pairs(groups, loaded, settings, cache, workers)
            return publish(cache, out, names, counts, **loaded.describe(), settings=settings)
    except Timeout:
        raise DataError(f"another process prepares {out}: wait for its end, or give another --out") from None


def _train_on_sample(groups: list[Group], vocab_size: int, cache: Path) -> Tokenizer:
    """Train a tokenizer on random documents of up to 16 groups, the same in every run."""
    chosen = groups[:: -(-len(groups) // _SAMPLE_GROUPS)]
    texts: list[str] = []
    for group in chosen:
        left = _SAMPLE_CHARACTERS // len(chosen)
        for rows in load_group(group, cache).shuffle(seed=0).iter(batch_size=1):
            texts += (some := texts_of(group, rows))
            left -= sum(map(len, some))
            if left <= 0:
                break
    tokens.train_tokenizer(texts, cache / "tokenizer.model", vocab_size=vocab_size, max_sentence_length=1 << 16)
    return load_tokenizer(str(cache / "tokenizer.model"))


def _write_pairs(
    groups: dict[str, list[Group]], tokenizer: Tokenizer, settings: dict[str, Any], cache: Path, workers: int
) -> tuple[list[str], tokens.Counts]:
    """Write the pairs into `cache`; return the names of the set's files, and documents and tokens of each side."""
    writers = {side: tokens.PairWriter(cache / side, tokenizer.vocab_size) for side in ("train", "valid")}
    limits = ("train", settings["tokens"], settings["valid_share"]), ("valid", settings["valid_tokens"], 0.0)
    for side, limit, share in limits:
        documents = (each for group in groups[side] for each in _documents(group, tokenizer, share, cache, workers))
        for ids, is_valid in documents:
            writers["valid" if is_valid else side].add(ids)
            if limit and writers[side].tokens >= limit:
                break
    for writer in writers.values():
        writer.close()
    if not writers["train"].tokens:
        raise DataError("there is no text for training: the sources have none, or --valid takes all of it")
    names = [f"{side}{ending}" for side, writer in writers.items() if writer.tokens for ending in ENDINGS]
    names += ["tokenizer.model"] if Path(tokenizer.source).parent == cache else []
    return names, {side: (writer.documents, writer.tokens) for side, writer in writers.items()}


def _documents(group: Group, tokenizer: Tokenizer, share: float, cache: Path, workers: int) -> Iterator[Any]:
    """Yield the ids of each document, end-of-text included, and whether it is for validation."""
    from datasets import Features, Sequence, Value

    print(f"> {group.name}", flush=True)
    data = load_group(group, cache)
    encoded = data.map(
        _encode, batched=True, batch_size=200, num_proc=workers if workers > 1 else None,
        features=Features({"ids": Sequence(Value(tokens.token_dtype(tokenizer.vocab_size))), "valid": Value("bool")}),
        fn_kwargs={"group": group, "tokenizer": (tokenizer.source, tokenizer.sha256), "share": share},
        remove_columns=data.column_names,
    )  # fmt: skip
    for table in encoded.with_format("arrow").iter(batch_size=1000):
        for ids, is_valid in zip(table["ids"], table["valid"], strict=True):
            yield ids.values.to_numpy(), is_valid.as_py()


def _encode(rows: dict[str, list[Any]], *, group: Group, tokenizer: tuple[str, str], share: float) -> dict[str, Any]:
    """Tokenize some rows. `datasets` finds earlier results by the arguments: the tokenizer's hash is one of them."""
    texts = texts_of(group, rows)
    loaded = _load_once(*tokenizer)
    ids = [[*token_ids, loaded.eos_id] if token_ids else [] for token_ids in loaded.encode(texts)]
    # A hash of the text decides, so that a document stays on its side when others come, and duplicates with it.
    hashes = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts]
    return {"ids": ids, "valid": [int.from_bytes(each, "big") < share * 2**64 for each in hashes]}


def find_groups(sources: Sequence[str], key: str, split: str, leave_out: Set[str] = frozenset()) -> list[Group]:
    """Return the files of the sources in their order, in groups of one kind and 1 GiB; `leave_out` has real paths."""
    groups: list[Group] = []
    room = 0
    for source in sources:
        files = [name for name in _files_of(source, split) if _kind(name)]
        if not files:
            raise DataError(f"{source} has nothing to read: give {READABLE}")
        for name in (each for each in files if os.path.realpath(each) not in leave_out):
            room -= file_bytes(name)
            if not groups or groups[-1].kind != _kind(name) or room < 0:
                groups.append(Group(_kind(name), [], key))
                room = _GROUP_BYTES - file_bytes(name)
            groups[-1].files.append(name)
    return groups


def _files_of(source: str, split: str) -> list[str]:
    if source == "c4" or source.startswith("hf:"):
        import datasets

        name, _, revision = ("allenai/c4:en" if source == "c4" else source[3:]).partition("@")
        name, _, configuration = name.partition(":")  # hf:NAME[:CONFIG][@REVISION]
        builder = datasets.load_dataset_builder(name, configuration or None, revision=revision or None)
        return [str(file) for file in builder.config.data_files.get(split, ())]  # at the commit that it has now
    path = Path(source)
    if path.is_dir():  # without what is hidden, and .json, which mostly describes other files
        below = sorted(each for each in path.rglob("*") if each.is_file() and each.suffix != ".json")
        return [str(each) for each in below if "/." not in f"/{each.relative_to(path)}"]
    return [source] if path.is_file() else []


def _kind(name: str) -> str:
    return _KINDS.get(Path(name.removesuffix(".gz").removesuffix(".zst")).suffix, "")


def file_bytes(name: str) -> int:
    return _GROUP_BYTES if "://" in name else Path(name).stat().st_size  # of the Hub the size is not known


def load_group(group: Group, cache: Path) -> Any:
    """Load a group as a `datasets.Dataset`: a row for each line, document, or value of the column."""
    import datasets

    for name in group.files:
        if name.endswith(".zst") and "://" not in name:
            _refuse_cut(name)
    options: dict[str, Any] = {"path": "parquet", "columns": [group.key], "batch_size": 1000}
    if group.kind != "parquet":
        features = datasets.Features({"text": datasets.Value("large_string")})
        options = {"path": "text", "sample_by": group.kind, "encoding": "utf-8-sig", "features": features}
    try:
        files = [name if "://" in name else glob.escape(name) for name in group.files]
        return datasets.load_dataset(**options, data_files=files, split="train", cache_dir=str(cache))
    except Exception as error:  # of many types; the cause of a DatasetGenerationError says what is wrong
        raise DataError(f"{group.name} cannot be read: {error.__cause__ or error!r}") from None


def _refuse_cut(name: str) -> None:
    """Refuse a .zst file that ends inside a frame: its reader takes that for the end of the text."""
    import zstandard

    frame = zstandard.ZstdDecompressor().decompressobj()
    with open(name, "rb") as file:
        while block := frame.unused_data or file.read(1 << 12):  # which may hold some 100 MB of text
            frame = zstandard.ZstdDecompressor().decompressobj() if frame.eof else frame
            frame.decompress(block)
    if not frame.eof:
        raise DataError(f"{name} ends in the middle of a frame: copy it again")


def texts_of(group: Group, rows: dict[str, list[Any]]) -> list[str]:
    """Return the texts of some rows of a group; blank lines have none, and any other without one is a DataError."""
    texts = []
    for row in rows[group.key if group.kind == "parquet" else "text"]:
        if group.kind == "line" and (not row or row.isspace()):
            continue
        try:
            text = json.loads(row)[group.key] if group.kind == "line" else row
            text.encode()  # half of a surrogate pair is no text
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            expected = f"expected a text under the key {group.key!r} (--key)"
            raise DataError(f"{group.name}: {expected}, got {str(row)[:80]!r} ({error!r})") from None
        texts.append(text)
    return texts
