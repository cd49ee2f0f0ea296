# SPDX-License-Identifier: Apache-2.0
"""Which objectives are asked: those of this package, or the one that `--objective` names."""

import pytest

from simreg_megatron import objectives


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--objective", action="append", metavar="NAME", help="of an installed package; may be repeated")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "objective" not in metafunc.fixturenames:
        return
    names = metafunc.config.getoption("--objective", default=None) or objectives.BUILT_IN
    found = [objectives.find(name) for name in names]
    metafunc.parametrize("objective", found, ids=[each.name for each in found])
