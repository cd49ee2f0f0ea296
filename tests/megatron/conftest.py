# SPDX-License-Identifier: Apache-2.0
"""Real text and trained starting points, made once a worker for all tests of this folder."""

from pathlib import Path

import pytest

from simreg_megatron.tools.builtin_corpus import BuiltinCorpus
from tests.megatron import text as texts
from tests.megatron.parity.run import Bench


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.megatron)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> BuiltinCorpus:
    """The documentation of a few packages of the standard library: real, and small enough to be quick."""
    return texts.make_corpus(tmp_path_factory.mktemp("text") / "corpus")


@pytest.fixture(scope="session")
def data_flags(text: BuiltinCorpus, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return texts.flags(text, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Computes parity cells; checkpoints and references are made once."""
    return Bench(tmp_path_factory.mktemp("parity"))
