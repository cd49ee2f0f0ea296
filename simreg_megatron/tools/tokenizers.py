# SPDX-License-Identifier: Apache-2.0
"""Load, train and export tokenizers: a sentencepiece `.model`, or a Hugging Face folder or name."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from simreg_megatron.tools.checkpoints import CheckpointError
from simreg_megatron.tools.indexed import DataError, sha256, token_dtype

_SAMPLE_CHARACTERS = 3_000_000  # enough for a small vocabulary, and takes seconds instead of minutes
# Tokenizers with equal vocabularies may still differ: in cases, digits, spaces, other scripts, bytes.
_PROBE = (
    "The 1234 quick  brown\tfoxes' jumps,\n\n  don't_stop CamelCase http://a.b/c?d=e "
    "na\u00efve \u00dcbergr\u00f6\u00dfe \u6771\u4eac \u3072\u3089\u304c\u306a \u0000 \U0001f98a."
)
_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template*")
_SPACE = "\u2581"  # sentencepiece's sign for a space


class Tokenizer(NamedTuple):
    """A loaded tokenizer; `encode` adds no special tokens, and takes one that a text spells for text."""

    source: str
    sha256: str  # of the file; for a Hugging Face tokenizer of its vocabulary, special ids and the ids of a probe text
    vocab_size: int  # number of ids, which is the rows that a model needs
    eos_id: int
    bos_id: int | None
    encode: Callable[[Sequence[str]], list[list[int]]]

    def describe(self) -> dict[str, Any]:
        """Describe the tokenizer in the manifest of a set."""
        return {
            "dtype": token_dtype(self.vocab_size), "vocab_size": self.vocab_size, "eos_id": self.eos_id,
            "bos_id": self.bos_id, "tokenizer_name": Path(self.source).name, "tokenizer_sha256": self.sha256,
        }  # fmt: skip


def load_tokenizer(source: str) -> Tokenizer:
    """Load a sentencepiece `.model` file, or a Hugging Face folder or name; a DataError if it is of no use."""
    try:
        found = _load_sentencepiece(source) if source.endswith(".model") else _load_hugging_face(source)
    except ImportError:
        raise
    except Exception as error:  # both libraries raise errors of any type
        raise DataError(f"{source} cannot be loaded as a tokenizer, a .model or a folder or name: {error}") from None
    if found.eos_id < 0:
        raise DataError(f"the tokenizer {source} has no end-of-text token, which closes each document: name one in it")
    return found


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
    """Train byte pairs on a fixed random draw of the texts: ids 0 unknown, 1 begin, 2 end of text; every byte is one.

    `options` are sentencepiece's, which writes those given into the model, so that its bytes depend on them.
    """
    import sentencepiece

    shuffled, lines, room = list(texts), [], _SAMPLE_CHARACTERS
    random.Random(0).shuffle(shuffled)
    for text in shuffled:
        lines += (some := [line for line in text.splitlines() if line.strip()])
        room -= sum(map(len, some))
        if room <= 0:
            break
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, model_type="bpe", vocab_size=vocab_size, byte_fallback=True,
        character_coverage=1.0, normalization_rule_name="identity", remove_extra_whitespaces=False,
        unk_id=0, bos_id=1, eos_id=2, pad_id=-1, num_threads=2, minloglevel=2, **options,
    )  # fmt: skip
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
    for path in (path for pattern in _FILES for path in source.glob(pattern)):
        shutil.copyfile(path, folder / path.name)
    with contextlib.suppress(DataError):
        if load_tokenizer(str(folder)).sha256 == tokenizer.sha256:
            return
    # Its class stands in a config.json, as GPT-2's does, or its vocabulary in another file.
    AutoTokenizer.from_pretrained(source, local_files_only=True).save_pretrained(folder)


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
    settings = {name: model.id_to_piece(number) for name, number in tokens.items() if number >= 0}
    settings |= {"clean_up_tokenization_spaces": False, "add_bos_token": False}
    settings |= {"split_special_tokens": True}  # a "</s>" in a text stays text
    transformers.PreTrainedTokenizerFast(tokenizer_object=fast, **settings).save_pretrained(folder)
    config = folder / "tokenizer_config.json"
    entries = {**json.loads(config.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}  # known to release 4
    config.write_text(json.dumps(entries, indent=2) + "\n")
    written = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if written(texts, add_special_tokens=False).input_ids != tokenizer.encode(texts):
        how = "convert it yourself and give the folder with its tokenizer.json"
        raise CheckpointError(f"transformers would tokenize some texts differently from {tokenizer.source}: {how}")
