# SPDX-License-Identifier: Apache-2.0
"""Marked `te`, and skipped where Transformer Engine is not installed: `make test-te` makes the environment."""

import importlib.util
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lacking = importlib.util.find_spec("transformer_engine") is None
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.te)
            if lacking:
                item.add_marker(pytest.mark.skip(reason="no Transformer Engine in this environment (make test-te)"))
