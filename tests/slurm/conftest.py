# SPDX-License-Identifier: Apache-2.0
"""One cluster and one text for all tests of this folder; without SLURM they are skipped, with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from simreg_megatron.data import BuiltinCorpus
from tests.megatron import text as texts
from tests.slurm import cluster as clusters


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[clusters.Cluster]:
    lacking = clusters.missing()
    if lacking:
        pytest.skip(lacking)
    with clusters.running(tmp_path_factory.mktemp("slurm") / "cluster") as started:
        yield started


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> BuiltinCorpus:
    return texts.make_corpus(tmp_path_factory.mktemp("text") / "corpus")
