# SPDX-License-Identifier: Apache-2.0
"""Texts encoded line by line have the ids of the whole; models for which that is not certain are left alone."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from simreg_megatron.data.linewise import cuts_at_lines, encode_by_lines
from tests.helpers.preparation import TEXTS

LINES = [line for text in TEXTS for line in text.splitlines()]
# As train_tokenizer trains, and as LLaMA-2's model is.
OURS = {
    "model_type": "bpe",
    "vocab_size": 400,
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "minloglevel": 2,
}


def train(**changes: Any) -> SentencePieceProcessor:
    model = io.BytesIO()
    SentencePieceTrainer.train(sentence_iterator=iter(LINES), model_writer=model, **{**OURS, **changes})
    return SentencePieceProcessor(model_proto=model.getvalue())


@pytest.fixture(scope="module")
def model() -> SentencePieceProcessor:
    return train()


PIECES = [
    "\n",
    "\n\n",
    " ",
    "  ",
    "\t",
    "\r\n",
    "\u2581",
    "\u00e9",
    "\u6771",
    "\x00",
    "a",
    "word12",
    "Text",
    "</s>",
    ".",
]


@settings(deadline=None, max_examples=300)
@given(texts=st.lists(st.lists(st.sampled_from(PIECES), max_size=9).map("".join), max_size=4))
def test_lines_give_the_ids_of_the_whole(model: SentencePieceProcessor, texts: list[str]) -> None:
    assert cuts_at_lines(model)
    assert encode_by_lines(model, texts) == model.encode(texts)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "unigram", "vocab_size": 350},
        {"byte_fallback": False},
        {"normalization_rule_name": "nmt_nfkc"},
        {"remove_extra_whitespaces": True},
        {"add_dummy_prefix": False},
        {"user_defined_symbols": ["\n\n"]},
    ],
)
def test_other_models_are_left_alone(changes: dict[str, Any]) -> None:
    assert not cuts_at_lines(train(**changes))


def test_a_piece_with_a_line_break_would_be_cut() -> None:
    """The wrong answer that the check prevents."""
    model = train(user_defined_symbols=["\n\n"])
    assert encode_by_lines(model, ["a\n\nb"]) != model.encode(["a\n\nb"])
