# SPDX-License-Identifier: Apache-2.0
"""Real text for the runs: documentation of the standard library, module by module or phrase by phrase.

A phrase ends every dozen tokens or so: sequences of 64 then hold several text ends, and unequal numbers of them.
"""

import json
import re
import sysconfig
from pathlib import Path

from simreg_megatron.tools import builtin_corpus
from simreg_megatron.tools.builtin_corpus import BuiltinCorpus
from simreg_megatron.tools.tokens import load_tokenizer, write_tokenizer

_PACKAGES = ("asyncio", "email", "logging", "concurrent", "importlib", "unittest", "json")
VOCABULARY = 512
_PHRASE_END = re.compile(r"[.,:;()]\s+|\n")


def _roots() -> list[Path]:
    library = Path(sysconfig.get_paths()["stdlib"])
    return [library / name for name in _PACKAGES]


def make_corpus(folder: Path) -> BuiltinCorpus:
    """The built-in corpus of a few packages: real, and small enough to be quick."""
    return builtin_corpus.ensure_builtin_corpus(folder, vocab_size=VOCABULARY, roots=_roots())


def documents() -> list[str]:
    return [text for name, text in builtin_corpus.read_documents(_roots()) if not builtin_corpus.is_validation(name)]


def phrases() -> list[str]:
    return [phrase.strip() for text in documents() for phrase in _PHRASE_END.split(text) if phrase.strip()]


def cut_into_phrases(corpus: BuiltinCorpus, prefix: Path) -> Path:
    """The corpus's training text once more, each phrase a document of its own."""
    builtin_corpus.write_pair(prefix, phrases(), corpus.tokenizer_model)
    return prefix


def chats(corpus: BuiltinCorpus, folder: Path) -> tuple[str, ...]:
    """Megatron's flags for fine-tuning on chats of three phrases, ten of them in a line."""
    folder.mkdir()
    write_tokenizer(load_tokenizer(str(corpus.tokenizer_model)), folder)
    roles = ("system", "user", "assistant") * 1000
    turns = [{"role": role, "content": phrase} for role, phrase in zip(roles, phrases(), strict=False)]
    lines = [json.dumps({"messages": turns[first : first + 30]}) for first in range(0, len(turns), 30)]
    (folder / "chats.jsonl").write_text("\n".join(lines), encoding="utf-8")
    data = [word for side in ("train", "valid", "test") for word in (f"--{side}-data-path", f"{folder}/chats.jsonl")]
    kind = "--sft-tokenizer-prompt-format identity --micro-batch-size 1 --no-create-attention-mask-in-dataloader --sft"
    return (*data, "--tokenizer-type", "SFTTokenizer", "--tokenizer-model", str(folder), *kind.split())


def flags(corpus: BuiltinCorpus, cache: Path, train: Path | None = None) -> tuple[str, ...]:
    """Megatron's flags for this text; `train` replaces the training text of the corpus."""
    return (
        *("--train-data-path", str(train or corpus.train_prefix), "--valid-data-path", str(corpus.valid_prefix)),
        *("--test-data-path", str(corpus.valid_prefix)),
        *("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(corpus.tokenizer_model)),
        *("--data-cache-path", str(cache), "--make-vocab-size-divisible-by", "64"),
    )
