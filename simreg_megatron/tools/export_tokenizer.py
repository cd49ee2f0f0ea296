# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of an exported model: copied from a Hugging Face folder, or converted from a sentencepiece model."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
from pathlib import Path

from simreg_megatron.tools.indexed import DataError
from simreg_megatron.tools.safe_load import CheckpointError
from simreg_megatron.tools.tokenizers import Tokenizer, load_tokenizer

_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template*")
_SPACE = "\u2581"  # sentencepiece's sign for a space
_SAMPLES = (
    "  leading and  double spaces, a tab\tand a trailing one ",
    "def f(x):\n    return [x ** 2, {'a': \"b\"}]  # 3.14159\n\n\nend",
    "\u00fcn\u00efc\u00f6d\u00e9 \u6f22\u5b57 \U0001f600 \u00a0non-breaking",
    "<s> </s> <unk> as plain text",
)


def check_size(args: argparse.Namespace, num_rows: int, size: int, given: str) -> None:
    """Refuse a tokenizer that is not that of training: the exported model would load and write nonsense.

    Args:
        args: Megatron's arguments in the checkpoint.
        num_rows: of the checkpoint's embedding.
        size: the number of tokens without padding.
        given: the option or the path that has this size.
    """
    # Rows are padded to a multiple of this; an imported checkpoint does not say how, so any number may be.
    multiple = getattr(args, "make_vocab_size_divisible_by", 0) * args.tensor_model_parallel_size or num_rows
    is_sentencepiece = "SentencePiece" in str(args.tokenizer_type)  # to which Megatron up to 0.15 appended tokens
    added = 7 + (getattr(args, "vocab_extra_ids", 0) or 0) if is_sentencepiece else 0
    if not num_rows - multiple - added < size <= num_rows:
        raise CheckpointError(
            f"{given} has {size} tokens, which Megatron does not pad to the checkpoint's {num_rows} rows: give the "
            f"tokenizer of training ({getattr(args, 'tokenizer_model', None)}), or leave it out to keep all rows"
        )


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write it to the folder of a model, in a form that tokenizes every text as in training."""
    from transformers import AutoTokenizer

    source = Path(tokenizer.source)
    if source.is_file():
        shutil.copyfile(source, folder / "tokenizer.model")
        _convert(tokenizer, folder)
        return
    for path in (path for pattern in _FILES for path in source.glob(pattern) if path.is_file()):
        shutil.copyfile(path, folder / path.name)
    with contextlib.suppress(DataError):
        if load_tokenizer(str(folder)).sha256 == tokenizer.sha256:
            return
    # Its class stands in a config.json, as GPT-2's does, or its vocabulary in another file.
    AutoTokenizer.from_pretrained(source, local_files_only=True).save_pretrained(folder)


def _convert(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a sentencepiece byte-pair model as tokenizer.json, and check that both tokenize alike."""
    import transformers
    from sentencepiece import SentencePieceProcessor
    from tokenizers import normalizers

    model = SentencePieceProcessor(model_file=tokenizer.source)
    texts = [*_SAMPLES, *(f"a{model.id_to_piece(i)}b".replace(_SPACE, " ") for i in range(tokenizer.vocab_size))]
    try:
        llama = transformers.LlamaTokenizerFast.from_pretrained(folder, local_files_only=True, add_bos_token=False)
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
        written = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        is_exact = written(texts, add_special_tokens=False).input_ids == tokenizer.encode(texts)
    except Exception as error:
        raise CheckpointError(f"{tokenizer.source} cannot be converted ({type(error).__name__}: {error})") from None
    if not is_exact:
        raise CheckpointError(
            f"transformers would tokenize some texts differently from {tokenizer.source}: convert it yourself and give "
            "the folder with its tokenizer.json"
        )
