# SPDX-License-Identifier: Apache-2.0
"""Token ids: the tokenizers that make them, and Megatron's .bin/.idx pairs that hold them.

A tokenizer is a sentencepiece `.model`, or a Hugging Face folder or name. PREFIX.bin holds all token ids, PREFIX.idx a
header, length (int32) and byte offset (int64) of each sequence, and how many end before each end of a document (int64).
The bytes are those of Megatron's IndexedDatasetBuilder, whose import takes seconds and a GPU.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from simreg_megatron.notices import SentenceError
from simreg_megatron.tools.checkpoints import CheckpointError

ENDINGS, MANIFEST = (".bin", ".idx"), "manifest.json"
Counts = dict[str, tuple[int, int]]  # documents and tokens of each side of a set
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, type code, sequences, ends of documents (with a leading 0)
_TYPES = {1: ("uint8", 1), 2: ("int8", 1), 3: ("int16", 2), 4: ("int32", 4), 5: ("int64", 8), 8: ("uint16", 2)}
_SAMPLE_CHARACTERS = 3_000_000  # enough for a small vocabulary, and takes seconds instead of minutes
# Tokenizers with equal vocabularies may still differ: in cases, digits, spaces, other scripts, bytes.
_PROBE = (
    "The 1234 quick  brown\tfoxes' jumps,\n\n  don't_stop CamelCase http://a.b/c?d=e "
    "na\u00efve \u00dcbergr\u00f6\u00dfe \u6771\u4eac \u3072\u3089\u304c\u306a \u0000 \U0001f98a."
)
_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template*")
_SPACE = "\u2581"  # sentencepiece's sign for a space


class DataError(SentenceError):
    """A text, tokenizer or data set that cannot be used; the message says why and how to fix it."""


def token_dtype(vocab_size: int) -> str:
    """Return the type of token ids by Megatron's rule: uint16 for vocabularies below 65,500, else int32."""
    return "uint16" if vocab_size < 65500 else "int32"


class PairWriter:
    """Write PREFIX.bin and PREFIX.idx, document by document; the number of token ids decides their type."""

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        self._prefix, self._dtype = prefix, token_dtype(vocab_size)
        self._bin = Path(f"{prefix}.bin").open("wb")  # noqa: SIM115
        self._lengths = array("i")
        self.documents = self.tokens = 0

    def add(self, ids: Iterable[int]) -> None:
        import numpy as np

        token_ids = np.asarray(ids, dtype=self._dtype)
        self._bin.write(token_ids.tobytes())
        self._lengths.append(len(token_ids))
        self.documents += 1
        self.tokens += len(token_ids)

    def close(self) -> None:
        import numpy as np

        self._bin.close()
        lengths = np.array(self._lengths, np.int32)
        sequences = lengths[lengths > 0]
        code, item_bytes = next((code, size) for code, (name, size) in _TYPES.items() if name == self._dtype)
        offsets, ends = np.cumsum(sequences, dtype=np.int64) - sequences, np.cumsum(lengths > 0, dtype=np.int64)
        header = _HEADER.pack(_MAGIC, 1, code, len(sequences), len(lengths) + 1)
        parts = (header, sequences.tobytes(), (offsets * item_bytes).tobytes(), bytes(8), ends.tobytes())
        Path(f"{self._prefix}.idx").write_bytes(b"".join(parts))


class Index(NamedTuple):
    """Contents of PREFIX.idx: the ids' numpy type, and the numbers of sequences, documents and tokens."""

    dtype: str
    sequences: int
    documents: int
    tokens: int


def read_index(prefix: str | os.PathLike[str]) -> Index:
    """Read the index of a pair without numpy; a DataError if a file is missing or cut, or they are of two pairs."""
    if not is_pair(prefix):
        raise DataError(explain_missing(prefix))
    data, path = (Path(f"{os.fspath(prefix)}{ending}") for ending in ENDINGS)
    if not os.access(path, os.R_OK):
        raise DataError(f"{path} cannot be read by you: ask its owner, or copy the set")
    with path.open("rb") as stream:
        head = stream.read(_HEADER.size).ljust(_HEADER.size, b"\0")
        magic, version, code, sequences, documents = _HEADER.unpack(head)
        size = _HEADER.size + 12 * sequences + 8 * documents
        if magic != _MAGIC or version != 1 or code not in _TYPES or path.stat().st_size < size or not sequences:
            raise DataError(f"{path} is not a whole Megatron index of token ids: prepare the data again")
        stream.seek(_HEADER.size + 4 * (sequences - 1))
        last = stream.read(4)  # the length of the last sequence, and its offset
        stream.seek(_HEADER.size + 12 * sequences - 8)
        length, offset = struct.unpack("<iq", last + stream.read(8))
    dtype, item_bytes = _TYPES[code]
    expected = offset + length * item_bytes
    if data.stat().st_size != expected:
        raise DataError(f"{data} has {data.stat().st_size} bytes and its .idx says {expected}: copy both again")
    return Index(dtype, sequences, documents - 1, expected // item_bytes)


def read_tokens(prefix: str | os.PathLike[str]) -> Any:
    """Map all token ids of a pair into a numpy array [tokens], without reading them."""
    import numpy as np

    return np.memmap(f"{os.fspath(prefix)}.bin", dtype=read_index(prefix).dtype, mode="r")


def explain_missing(prefix: str | os.PathLike[str]) -> str:
    return f"there is no {prefix}.bin with {prefix}.idx: give the path of both without the ending, or prepare the data"


def is_pair(prefix: str | os.PathLike[str]) -> bool:
    return all(os.path.isfile(f"{os.fspath(prefix)}{ending}") for ending in ENDINGS)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()  # hashlib.file_digest came with Python 3.11
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    return {name: {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)} for name in names}


def find_changed(folder: Path, manifest: dict[str, Any]) -> Path | None:
    """Return the first file of a set that is missing or of another size than its manifest says."""
    sizes = {folder / name: facts["bytes"] for name, facts in manifest["files"].items()}
    return next((path for path, size in sizes.items() if not path.is_file() or path.stat().st_size != size), None)


def publish(work: Path, out: Path, names: Sequence[str], counts: Counts, **facts: Any) -> dict[str, Any]:
    """Move a complete set from `work` to `out`, the manifest last; delete `work`, and return the manifest."""
    documents, tokens = ({side: counted[place] for side, counted in counts.items()} for place in (0, 1))
    manifest = {"documents": documents, "tokens": tokens, **facts, "files": describe_files(work, names)}
    (work / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    for name in (*names, MANIFEST):
        (work / name).replace(out / name)
    shutil.rmtree(work, ignore_errors=True)  # NFS keeps files that are open
    return manifest


class Tokenizer(NamedTuple):
    """A loaded tokenizer; `encode` adds no special tokens, and takes one that a text spells for text."""

    source: str
    sha256: str  # of the file; for a Hugging Face tokenizer of its vocabulary, special ids and the ids of a probe text
    vocab_size: int  # number of ids, which is the rows that a model needs
    eos_id: int
    bos_id: int | None
    encode: Callable[[Sequence[str]], list[list[int]]]

    def describe(self) -> dict[str, Any]:
        return {
            "dtype": token_dtype(self.vocab_size), "vocab_size": self.vocab_size, "eos_id": self.eos_id,
            "bos_id": self.bos_id, "tokenizer_name": Path(self.source).name, "tokenizer_sha256": self.sha256,
        }  # fmt: skip


def load_tokenizer(source: str) -> Tokenizer:
    """Load a sentencepiece `.model` file, or a Hugging Face folder or name; a DataError if it is of no use."""
    try:
        tokenizer = _load_sentencepiece(source) if source.endswith(".model") else _load_hugging_face(source)
    except ImportError:
        raise
    except Exception as error:  # both libraries raise errors of any type
        raise DataError(f"{source} cannot be loaded as a tokenizer, a .model or a folder or name: {error}") from None
    if tokenizer.eos_id < 0:
        raise DataError(f"the tokenizer {source} has no end-of-text token, which closes each document: name one in it")
    return tokenizer


def _load_sentencepiece(source: str) -> Tokenizer:
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=source)
    size, eos, bos = model.get_piece_size(), model.eos_id(), model.bos_id()
    encode = lambda texts: model.encode(list(texts), num_threads=1)  # noqa: E731
    return Tokenizer(source, sha256(Path(source)), size, eos, None if bos < 0 else bos, encode)


def _load_hugging_face(source: str) -> Tokenizer:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=Path(source).is_dir(), trust_remote_code=False)
    probe = tokenizer(_PROBE, add_special_tokens=False).input_ids
    eos = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id  # as Megatron does
    bos = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.cls_token_id
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    digest = hashlib.sha256(json.dumps([vocabulary, probe, eos, bos]).encode()).hexdigest()
    as_text = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}  # of any length
    encode = lambda texts: tokenizer(list(texts), **as_text).input_ids if texts else []  # noqa: E731
    return Tokenizer(source, digest, len(tokenizer), -1 if eos is None else eos, bos, encode)


def train_tokenizer(texts: Sequence[str], output: Path, *, vocab_size: int, **options: Any) -> None:
    """Train byte pairs on a fixed random draw of the texts: ids 0 unknown, 1 begin, 2 end of text; any byte is one."""
    import sentencepiece

    shuffled, lines, room = list(texts), [], _SAMPLE_CHARACTERS
    random.Random(0).shuffle(shuffled)
    for text in shuffled:
        lines += (some := [line for line in text.splitlines() if line.strip()])
        room -= sum(map(len, some))
        if room <= 0:
            break
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=model, model_type="bpe", vocab_size=vocab_size,
            byte_fallback=True, character_coverage=1.0, normalization_rule_name="identity", pad_id=-1,
            remove_extra_whitespaces=False, unk_id=0, bos_id=1, eos_id=2, num_threads=2, minloglevel=2, **options,
        )  # fmt: skip
    except RuntimeError as error:
        raise DataError(f"no tokenizer of {vocab_size} pieces can be trained on this text: {error}") from None
    output.write_bytes(model.getvalue())


def check_size(args: argparse.Namespace, num_rows: int, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer that is not that of training: the exported model would write nonsense."""
    # Rows are padded to a multiple of this; an imported checkpoint does not say how, so any number may be.
    multiple = getattr(args, "make_vocab_size_divisible_by", 0) * args.tensor_model_parallel_size or num_rows
    is_sentencepiece = "SentencePiece" in str(args.tokenizer_type)  # to which Megatron up to 0.15 appended tokens
    added = 7 + (getattr(args, "vocab_extra_ids", 0) or 0) if is_sentencepiece else 0
    source, trained = Path(tokenizer.source), Path(getattr(args, "tokenizer_model", None) or ".")
    is_other = source.is_file() and trained.is_file() and source.read_bytes() != trained.read_bytes()
    if is_other or not num_rows - multiple - added < tokenizer.vocab_size <= num_rows:
        own = f"the tokenizer of training ({trained}; padded to {num_rows} rows): give that one, or none to keep all"
        raise CheckpointError(f"{source} with {tokenizer.vocab_size} tokens is not {own}")


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write it to the folder of a model, in a form that tokenizes every text as in training."""
    from transformers import AutoTokenizer

    source = Path(tokenizer.source)
    if source.is_file():
        _convert(tokenizer, folder)
        return
    folders = (source.resolve(), source.resolve().parent.parent / "blobs")  # where the Hub's cache has the files
    for path in (path for pattern in _FILES for path in source.glob(pattern)):
        if path.resolve().parent in folders:  # a link in a folder from elsewhere may lead to a private file
            shutil.copyfile(path, folder / path.name)
    with contextlib.suppress(DataError):
        if load_tokenizer(str(folder)).sha256 == tokenizer.sha256:
            return
    # Its class stands in a config.json, as GPT-2's does, or its vocabulary in another file.
    AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False).save_pretrained(folder)


def _convert(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a sentencepiece byte-pair model, also as tokenizer.json, and check that both tokenize alike."""
    import transformers
    from sentencepiece import SentencePieceProcessor
    from tokenizers import normalizers

    shutil.copyfile(tokenizer.source, folder / "tokenizer.model")
    model = SentencePieceProcessor(model_file=tokenizer.source)
    pieces = (model.id_to_piece(number).replace(_SPACE, " ") for number in range(tokenizer.vocab_size))
    texts = [f"  {_PROBE} <s> </s> <unk> as plain text ", *(f"a{piece}b" for piece in pieces)]
    llama = transformers.LlamaTokenizerFast.from_pretrained(folder, local_files_only=True, add_bos_token=False)
    fast = llama.backend_tokenizer
    steps = [normalizers.Prepend(_SPACE)] if model.encode("a", out_type=str)[0].startswith(_SPACE) else []
    fast.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    fast.pre_tokenizer = None
    tokens = {"bos_token": model.bos_id(), "eos_token": model.eos_id(), "unk_token": model.unk_id()}
    settings: dict[str, Any] = {name: model.id_to_piece(number) for name, number in tokens.items() if number >= 0}
    settings |= {"clean_up_tokenization_spaces": False, "add_bos_token": False, "split_special_tokens": True}
    transformers.PreTrainedTokenizerFast(tokenizer_object=fast, **settings).save_pretrained(folder)
    config = folder / "tokenizer_config.json"
    entries = {**json.loads(config.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}  # known to release 4
    config.write_text(json.dumps(entries, indent=2) + "\n")
    written = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if written(texts, add_special_tokens=False).input_ids != tokenizer.encode(texts):
        how = "convert it yourself and give the folder with its tokenizer.json"
        raise CheckpointError(f"transformers would tokenize some texts differently from {tokenizer.source}: {how}")
