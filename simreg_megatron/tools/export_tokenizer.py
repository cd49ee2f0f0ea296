# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of an exported model: copied from a Hugging Face folder, or converted from a sentencepiece model."""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simreg_megatron.tools.safe_load import CheckpointError

_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template*")
_SPACE = "\u2581"  # sentencepiece's sign for a space
_SAMPLES = (
    "  leading and  double spaces, a tab\tand a trailing one ",
    "def f(x):\n    return [x ** 2, {'a': \"b\"}]  # 3.14159\n\n\nend",
    "\u00fcn\u00efc\u00f6d\u00e9 \u6f22\u5b57 \U0001f600 \u00a0non-breaking",
    "<s> </s> <unk> as plain text",
)


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer: a Hugging Face one loaded from the folder `path`, or a sentencepiece model from the file `path`."""

    path: Path
    loaded: Any
    size: int
    bos: int | None
    eos: int | None

    def encode(self, texts: list[str]) -> list[list[int]]:
        if self.path.is_file():
            return list(self.loaded.encode(texts))
        return list(self.loaded(texts, add_special_tokens=False)["input_ids"])

    def write(self, folder: Path) -> None:
        """Write it to the folder of a model, in a form that tokenizes every text as in training."""
        if self.path.is_file():
            _convert(self, folder)
            shutil.copyfile(self.path, folder / "tokenizer.model")
            return
        for path in (path for pattern in _FILES for path in self.path.glob(pattern)):
            shutil.copyfile(path, folder / path.name)


def open_tokenizer(path: Path) -> Tokenizer:
    """Open a folder with a Hugging Face tokenizer, or a sentencepiece .model file."""
    try:
        if path.is_dir():
            from transformers import AutoTokenizer

            found = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            if (largest := max(found.get_vocab().values())) >= len(found):
                raise ValueError(f"it has {len(found)} tokens and gives one the number {largest}: fill the gaps")
            return Tokenizer(path, found, len(found), found.bos_token_id, found.eos_token_id)
        from sentencepiece import SentencePieceProcessor

        model = SentencePieceProcessor(model_file=str(path))
        bos, eos = (None if number < 0 else number for number in (model.bos_id(), model.eos_id()))
        return Tokenizer(path, model, model.vocab_size(), bos, eos)
    except Exception as error:  # both libraries raise errors of any type for a damaged file
        raise CheckpointError(
            f"--tokenizer needs a folder with a Hugging Face tokenizer or a sentencepiece .model file, and {path} "
            f"cannot be loaded as one ({type(error).__name__}: {error})"
        ) from None


def check_tokenizer(args: argparse.Namespace, num_rows: int, size: int, given: Path | None) -> None:
    """Refuse a tokenizer that is not that of training: the exported model would load and write nonsense.

    Args:
        args: Megatron's arguments in the checkpoint.
        num_rows: of the checkpoint's embedding.
        size: the number of tokens without padding.
        given: the tokenizer's path; None if only its size is known.
    """
    # An imported checkpoint does not say how it was padded.
    multiple = getattr(args, "make_vocab_size_divisible_by", 0) * args.tensor_model_parallel_size
    is_sentencepiece = "SentencePiece" in str(args.tokenizer_type)  # to which Megatron up to 0.15 appended tokens
    added = 7 + (getattr(args, "vocab_extra_ids", 0) or 0) if is_sentencepiece else 0
    rows = {-(-(size + more) // multiple) * multiple for more in range(added + 1)} if multiple else {num_rows}
    trained = getattr(args, "tokenizer_model", None)
    if size > num_rows or num_rows not in rows:
        raise CheckpointError(
            f"{given or '--vocab-size'} has {size} tokens, which Megatron pads to {min(rows)} rows, but the checkpoint "
            f"has {num_rows} rows: give the tokenizer of training ({trained}), or leave it out to keep all rows"
        )
    trained_file = Path(trained or ".")
    if given and given.is_file() and trained_file.is_file() and given.read_bytes() != trained_file.read_bytes():
        raise CheckpointError(f"{given} is not the tokenizer of training, {trained}: give that one, or none")


def _convert(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a sentencepiece byte-pair model as tokenizer.json, and check that both tokenize alike."""
    import transformers
    from tokenizers import normalizers

    model, scratch = tokenizer.loaded, folder / "convert"
    scratch.mkdir()
    shutil.copyfile(tokenizer.path, scratch / "tokenizer.model")
    texts = [*_SAMPLES, *(f"a{model.id_to_piece(i)}b".replace(_SPACE, " ") for i in range(tokenizer.size))]
    try:
        llama = transformers.LlamaTokenizerFast.from_pretrained(scratch, local_files_only=True, add_bos_token=False)
        fast = llama.backend_tokenizer
        steps = [normalizers.Prepend(_SPACE)] if model.encode("a", out_type=str)[0].startswith(_SPACE) else []
        fast.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
        fast.pre_tokenizer = None
        tokens = {"bos_token": model.bos_id(), "eos_token": model.eos_id(), "unk_token": model.unk_id()}
        special = {name: model.id_to_piece(number) for name, number in tokens.items() if number >= 0}
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=fast, clean_up_tokenization_spaces=False, add_bos_token=False,
            split_special_tokens=True, **special,  # a "</s>" in a text stays text
        ).save_pretrained(folder)  # fmt: skip
        config = folder / "tokenizer_config.json"
        entries = {**json.loads(config.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}  # known to release 4
        config.write_text(json.dumps(entries, indent=2) + "\n")
        is_exact = open_tokenizer(folder).encode(texts) == tokenizer.encode(texts)
    except Exception as error:
        raise CheckpointError(f"{tokenizer.path} cannot be converted ({type(error).__name__}: {error})") from None
    if not is_exact:
        raise CheckpointError(
            f"transformers would tokenize some texts differently from {tokenizer.path}: convert it yourself and give "
            "the folder with its tokenizer.json"
        )
    shutil.rmtree(scratch)
