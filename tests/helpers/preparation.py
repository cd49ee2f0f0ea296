# SPDX-License-Identifier: Apache-2.0
"""Texts, tokenizers and calls that the tests of prepared data share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from simreg_megatron.data import prepare
from simreg_megatron.data.prepare import Task

NUM_TEXTS = 330
BLOCK = 4096


def make_text(index: int) -> str:
    """Texts of unequal length, some of them empty, with spaces, digits and scripts that tokenizers treat apart."""
    if index % 50 == 7:
        return ""
    words = [f"word{(index * 7 + i * i) % 97}" for i in range(5 + index * 13 % 60)]
    return f"Text {index}:  " + " ".join(words) + ("\n\u6771\u4eac na\u00efve\t\U0001f98a" if index % 9 == 0 else "")


TEXTS = [make_text(index) for index in range(NUM_TEXTS)]


def lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"id": 1, "text": text}, ensure_ascii=False).encode() + b"\n" for text in texts)


def make(output: Path, *sources: Path, tokenizer: Path, **more: Any) -> dict[str, Any] | None:
    settings = {"block_bytes": BLOCK, **more}
    return prepare.prepare(Task(list(map(str, sources)), output, str(tokenizer), **settings))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if not path.name.startswith(".")}


def train_hugging_face(path: Path) -> Path:
    """A byte-level tokenizer that opens each text with <s>, as LLaMA's does, and would cut texts at 8 tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    return save_hugging_face(backend, path)


def save_hugging_face(backend: Any, path: Path) -> Path:
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.enable_truncation(8)
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(path)
    return path
