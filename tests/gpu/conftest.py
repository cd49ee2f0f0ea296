# SPDX-License-Identifier: Apache-2.0
"""Runs on real GPUs: marked `gpu`, and skipped where there are none or too few, or no Transformer Engine."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.gpu import runs
from tests.gpu.runs import Observed, Run
from tests.megatron import text


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.megatron)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))


@pytest.fixture(scope="session")
def data_flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    corpus = text.make_corpus(tmp_path_factory.mktemp("text") / "corpus")
    return text.flags(corpus, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def observed(data_flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Callable[[Run], Observed]:
    """observed(run): what the run computed; each is made once. Skips where this machine cannot make it."""

    @cache
    def observe(run: Run) -> Observed:
        reason = runs.why_not(run)
        if reason:
            pytest.skip(reason)
        return runs.observe(run, data_flags, tmp_path_factory.mktemp("run"))

    return observe


@pytest.fixture(scope="session")
def checkpoints(data_flags, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Run], tuple[str, ...]]:
    """checkpoints(run): flags that start from what the run had learnt after its steps, in any layout."""

    @cache
    def make(run: Run) -> tuple[str, ...]:
        reason = runs.why_not(run)
        if reason:
            pytest.skip(reason)
        folder = tmp_path_factory.mktemp("checkpoint")
        save = ("--save", str(folder), "--save-interval", str(runs.STEPS))
        runs.observe(run.with_flags(*save), data_flags, tmp_path_factory.mktemp("run"))
        return ("--load", str(folder), "--finetune", "--no-load-optim", "--no-load-rng")

    return make
