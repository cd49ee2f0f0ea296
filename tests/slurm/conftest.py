# SPDX-License-Identifier: Apache-2.0
"""One cluster and one text for all tests of this folder; without SLURM they are skipped, with the reason."""

import json
from collections.abc import Iterator
from itertools import batched
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers import jobs
from tests.megatron import text as texts
from tests.megatron.runs import ROOT
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
def text(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """From a folder of .jsonl files, by the command that docs/cluster.md names."""
    source, out = tmp_path_factory.mktemp("jsonl"), tmp_path_factory.mktemp("prepared") / "set"
    for number, texts_of_file in enumerate(batched(texts.documents(), 50)):
        lines = (json.dumps({"text": document}) + "\n" for document in texts_of_file)
        (source / f"{number:03d}.jsonl").write_text("".join(lines))
    command = ["bash", "launch/prepare_data.sh", str(source), "--train-tokenizer", "512", "--out", str(out)]
    done = jobs.run(command, cwd=ROOT, timeout=1800, merged=True)
    assert done.returncode == 0, done.stdout
    return SimpleNamespace(train_prefix=out / "train", tokenizer_model=out / "tokenizer.model")
