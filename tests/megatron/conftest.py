# SPDX-License-Identifier: Apache-2.0
"""Real text and a trained starting point, made once for all tests of this folder."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from simreg_megatron.data import BuiltinCorpus, ensure_builtin_corpus
from tests.megatron import runs


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.megatron)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> BuiltinCorpus:
    """The documentation of two packages of the standard library: real, and small enough to be quick."""
    library = Path(sysconfig.get_paths()["stdlib"])
    roots = [library / name for name in ("asyncio", "email", "logging", "concurrent", "importlib", "unittest", "json")]
    return ensure_builtin_corpus(
        tmp_path_factory.mktemp("text") / "corpus", vocab_size=512, roots=roots, progress=False
    )


@pytest.fixture(scope="session")
def data_flags(text: BuiltinCorpus, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [
        *("--train-data-path", str(text.train_prefix), "--valid-data-path", str(text.valid_prefix)),
        *("--test-data-path", str(text.valid_prefix)),
        *("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(text.tokenizer_model)),
        *("--data-cache-path", str(tmp_path_factory.mktemp("cache"))),
        *("--make-vocab-size-divisible-by", "64"),
    ]


@pytest.fixture(scope="session")
def checkpoint(data_flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model after ten steps of plain pretraining; every layout starts from it."""
    folder = tmp_path_factory.mktemp("checkpoint")
    flags = [*data_flags, "--train-iters", "10", "--save", str(folder), "--save-interval", "10"]
    done = runs.train(folder / "record", flags)
    assert done.status == 0, done.output[-4000:]
    return folder
