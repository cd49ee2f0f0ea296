# SPDX-License-Identifier: Apache-2.0
"""For all tests: one thread, no network, an order in which long files come first, or one of chance, and old torches."""

import os

# Before torch is imported. Workers take one core each; where another job holds a core, the second thread of a small sum
# is waited for at every sum, and a test of four seconds takes a hundred.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Generator
from itertools import groupby
from pathlib import Path
from random import Random

import pytest

from tests.helpers.old_torch import OLD_TORCH

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_OFFLINE="1")  # before their imports
HERE = Path(__file__).parent
LONG = (
    "megatron/test_parity.py", "unit/test_evaluate.py", "distributed/test_shard.py", "megatron/test_adagc.py",
    "megatron/test_launch.py", "unit/test_triton_forms.py", "megatron/test_export.py", "megatron/test_drift.py",
    "megatron/test_start.py", "unit/test_simreg_loss.py", "unit/test_fake_devices.py",
    "objectives/test_every_objective.py", "unit/test_launcher.py", "megatron/test_planted.py",
    "objectives/test_brought.py", "unit/test_wrong_inputs.py",
)  # fmt: skip
"""Files that take long; whichever worker got one of them last would end long after the other."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="files, and the tests of each, in an order of chance")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    files = [list(tests) for _, tests in groupby(items, key=lambda item: item.path)]
    seed = config.getoption("--shuffle")
    if seed is None:
        places = {HERE / name: place for place, name in enumerate(LONG)}
        files.sort(key=lambda tests: places.get(tests[0].path, len(LONG)))
    else:
        chance = Random(seed)
        for tests in files:
            chance.shuffle(tests)
        chance.shuffle(files)
    items[:] = [item for tests in files for item in tests]


WITHOUT_A_GPU = "the Triton of an older torch cannot be imported without a GPU, and Megatron imports it"
REASONS = {
    "0 active drivers": WITHOUT_A_GPU,
    "CUDA driver version is insufficient": "an older torch asks for a driver when it frees CUDA tensors without memory",
    "needs Triton 3.4 or newer": "the Triton of an older torch has no descriptors",
    "TokenizersBackend does not exist": "the tokenizer of the fixtures is of transformers 5",
    "ranks are forked with torch 2.8 or newer": "ranks that are forked with an older torch hang now and then",
    "_is_autocast_available": "an older torch.compile breaks the graph where autocast is left",
    "types.UnionType": "an older torch.compile cannot look into a union of types",
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    if OLD_TORCH and item.get_closest_marker("megatron"):
        pytest.skip(WITHOUT_A_GPU)
    if OLD_TORCH and item.name.startswith(("test_no_change_adds_launches", "test_at_most_256")):  # they would abort
        pytest.skip(REASONS["CUDA driver version is insufficient"])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """With an old torch, what can only be refused counts as left out."""
    try:
        return (yield)
    except Exception as error:
        for words, reason in REASONS.items():
            if OLD_TORCH and words in str(error):
                pytest.skip(reason)
        raise
