# SPDX-License-Identifier: Apache-2.0
"""A part of a matrix for `make test`; the rest runs in `make test-all`."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def quick(values: Iterable[Any], is_quick: Callable[[Any], bool]) -> list[Any]:
    """All values for `parametrize`; those that are not quick are marked slow."""
    return [value if is_quick(value) else pytest.param(value, marks=pytest.mark.slow) for value in values]


def quick_rows(rows: Iterable[tuple[Any, ...]], is_quick: Callable[[tuple[Any, ...]], bool]) -> list[Any]:
    """All rows for `parametrize` with several names; those that are not quick are marked slow."""
    return [pytest.param(*row, marks=() if is_quick(row) else pytest.mark.slow) for row in rows]
