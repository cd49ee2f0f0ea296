# SPDX-License-Identifier: Apache-2.0
"""Tokenizers, as the data's preparation reads them."""

from __future__ import annotations

import contextlib
from pathlib import Path

from simreg_megatron.data.encoding import Encoder, describe_tokenizer
from simreg_megatron.data.indexed import DataError
from tests.fuzz.target import CORPUS, Target

with contextlib.suppress(ImportError):  # of some tokenizers transformers imports it late, whatever is in them
    import google.protobuf  # noqa: F401

_TEXTS = ["A text of two lines,\n  with 1234 digits and \u6771\u4eac.", ""]
_JSON = (
    b'"type"', b'"BPE"', b'"Unigram"', b'"WordLevel"', b'"byte_fallback":true', b'"merges"', b'"vocab"', b"{}", b"[]",
    b"null", b"-1", b"4294967295", b'"Sequence"', b'"Regex"', b'"(a+)+$"', b'"Precompiled"', b'"trust_remote_code"',
)  # fmt: skip
_CONFIG = (
    b'"tokenizer_class"', b'"auto_map"', b'{"AutoTokenizer":["other/repo--code.Class",null]}', b'"LlamaTokenizer"',
    b'"chat_template"', b'"eos_token"', b'"model_max_length"', b'"added_tokens_decoder"', b'"extra_special_tokens"',
    b"null", b"[]", b"{}", b'"PreTrainedTokenizerFast"', b'"tokenizer_file"', b'"../../x"', b'"tokenizers_code.Tok"',
)  # fmt: skip


def _sentencepiece(folder: Path, data: bytes) -> None:
    path = folder / "tokenizer.model"
    path.write_bytes(data)
    facts = describe_tokenizer(str(path))
    Encoder(facts).encode(_TEXTS)


def _folder(folder: Path) -> None:
    (folder / "made").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (seed,) = (CORPUS / name.replace("_", "-").replace(".", "-")).iterdir()
        (folder / "made" / name).write_bytes(seed.read_bytes())


def _folder_file(name: str):  # type: ignore[no-untyped-def]
    def read(folder: Path, data: bytes) -> None:
        (folder / "made" / name).write_bytes(data)
        Encoder(describe_tokenizer(str(folder / "made"))).encode(_TEXTS)

    return read


_ERRORS = (DataError,)
TARGETS = (
    Target("sentencepiece", _sentencepiece, _ERRORS, words=(b"\x0a\x0e\x0a\x05", b"\xe2\x96\x81"), mutations=40),
    Target("tokenizer-json", _folder_file("tokenizer.json"), _ERRORS, _folder, _JSON, mutations=40),
    Target("tokenizer-config-json", _folder_file("tokenizer_config.json"), _ERRORS, _folder, _CONFIG, mutations=40),
)
