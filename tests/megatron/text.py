# SPDX-License-Identifier: Apache-2.0
"""Real text for the runs: documentation of the standard library, whole and cut into paragraphs.

A paragraph ends every few dozen tokens, so that sequences of 64 hold text ends in unequal numbers.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

from simreg_megatron.data import BuiltinCorpus, ensure_builtin_corpus
from tests.megatron import forks

_PACKAGES = ("asyncio", "email", "logging", "concurrent", "importlib", "unittest", "json")
VOCABULARY = 512


def _roots() -> list[Path]:
    library = Path(sysconfig.get_paths()["stdlib"])
    return [library / name for name in _PACKAGES]


def make_corpus(folder: Path) -> BuiltinCorpus:
    """The built-in corpus of a few packages: real, and small enough to be quick."""
    return ensure_builtin_corpus(folder, vocab_size=VOCABULARY, roots=_roots(), progress=False)


def cut_into_paragraphs(corpus: BuiltinCorpus, prefix: Path) -> Path:
    """The corpus's training text once more, each paragraph a document of its own."""
    from simreg_megatron.data.corpus import read_documents

    texts = [document.text for document in read_documents(_roots()) if not document.is_validation]
    paragraphs = [part.strip() for text in texts for part in text.split("\n\n") if part.strip()]
    arguments = (prefix, paragraphs, corpus.tokenizer_model)
    log = prefix.with_suffix(".log")
    if forks.run_ranks(_write, *arguments, processes=1, log=log, timeout=120):
        raise RuntimeError(log.read_text())
    return prefix


def _write(prefix: Path, paragraphs: list[str], tokenizer: Path) -> None:
    """On a forked rank: Megatron's builder imports Megatron, which the calling process must not."""
    from simreg_megatron.data.indexed import write_dataset

    write_dataset(prefix, paragraphs, tokenizer)


def flags(corpus: BuiltinCorpus, cache: Path, train: Path | None = None) -> tuple[str, ...]:
    """Megatron's flags for this text; `train` replaces the training text of the corpus."""
    return (
        *("--train-data-path", str(train or corpus.train_prefix), "--valid-data-path", str(corpus.valid_prefix)),
        *("--test-data-path", str(corpus.valid_prefix)),
        *("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(corpus.tokenizer_model)),
        *("--data-cache-path", str(cache), "--make-vocab-size-divisible-by", "64"),
    )
