# SPDX-License-Identifier: Apache-2.0
"""Short texts and a Hugging Face tokenizer that tests share."""

import json
from pathlib import Path


def _make_text(index: int) -> str:
    """Make a text of its own length, sometimes empty, with spaces, digits and scripts that tokenizers treat apart."""
    if index % 50 == 7:
        return ""
    words = [f"word{(index * 7 + i * i) % 97}" for i in range(5 + index * 13 % 60)]
    return f"Text {index}:  " + " ".join(words) + ("\n\u6771\u4eac na\u00efve\t\U0001f98a" if index % 9 == 0 else "")


TEXTS = [_make_text(index) for index in range(330)]


def lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"id": 1, "text": text}, ensure_ascii=False).encode() + b"\n" for text in texts)


def train_hugging_face(path: Path) -> Path:
    """Save a byte-level tokenizer that opens each text with <s>, as LLaMA's does, and would cut texts at 8 tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    settings = {"special_tokens": ["<s>", "</s>"], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    trainer = trainers.BpeTrainer(vocab_size=420, show_progress=False, **settings)
    backend.train_from_iterator(TEXTS, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.enable_truncation(8)
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(path)
    return path
