# SPDX-License-Identifier: Apache-2.0
"""A sentencepiece tokenizer trained on the spot."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from pathlib import Path

from simreg_megatron.data.indexed import DataError

_SAMPLE_CHARACTERS = 3_000_000  # enough for a small vocabulary, and seconds instead of minutes


def train_tokenizer(texts: Sequence[str], output: Path, *, vocab_size: int) -> None:
    """Write a byte-pair model to `output`: ids 0 unknown, 1 begin, 2 end; bytes stand in for what is not learned."""
    try:
        import sentencepiece
    except ImportError:
        raise DataError("sentencepiece is needed to train a tokenizer: pip install sentencepiece") from None

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_sample(texts)),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        num_threads=2,
        minloglevel=2,
    )
    output.write_bytes(model.getvalue())


def _sample(texts: Sequence[str]) -> list[str]:
    """Whole lines of randomly chosen documents (a fixed draw), up to the sample's size."""
    order = list(range(len(texts)))
    random.Random(0).shuffle(order)
    lines: list[str] = []
    characters = 0
    for index in order:
        for line in texts[index].splitlines():
            if line.strip():
                lines.append(line)
                characters += len(line)
        if characters >= _SAMPLE_CHARACTERS:
            break
    return lines
