# SPDX-License-Identifier: Apache-2.0
"""A HybridModel with Mamba layers, whose kernels need a GPU: SimReg's gradient is the written-out sum's."""

from __future__ import annotations

import pytest

from tests.megatron.runs import torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.megatron]


def test_mamba_layers() -> None:
    for package in ("transformer_engine", "mamba_ssm", "causal_conv1d"):
        pytest.importorskip(package)
    done = torchrun(["-m", "tests.gpu.mamba_script"])
    assert done.status == 0 and "mamba script: all as expected" in done.output, done.output[-4000:]
