# SPDX-License-Identifier: Apache-2.0
from pathlib import Path
from typing import Any

from simreg_megatron.data.indexed import DataError
from simreg_megatron.tools.tokenizers import RECORD, Tokenizer, load_tokenizer

__all__ = ["RECORD", "SENTENCEPIECE", "TokenizerFacts", "describe_tokenizer", "load_hugging_face", "load_sentencepiece"]

SENTENCEPIECE = "sentencepiece"


class TokenizerFacts(Tokenizer):
    record = Tokenizer.facts


def describe_tokenizer(source: str) -> TokenizerFacts:
    return TokenizerFacts(**vars(load_tokenizer(source)))


def load_sentencepiece(source: str) -> Any:
    import sentencepiece

    load_tokenizer(source)
    return sentencepiece.SentencePieceProcessor(model_file=source)


def load_hugging_face(source: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=Path(source).is_dir(), trust_remote_code=False)
    except Exception as error:
        raise DataError(f"{source} cannot be loaded as a tokenizer ({' '.join(str(error).split())[:200]})") from None


def refuse_holes(tokenizer: Any, source: str | Path) -> None:
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= len(tokenizer):
        raise DataError(
            f"the tokenizer {source} has {len(tokenizer):,} tokens and gives one of them the id {largest:,}"
        )
