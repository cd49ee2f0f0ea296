# SPDX-License-Identifier: Apache-2.0
"""A HybridModel with Mamba layers, whose kernels need a GPU: SimReg's gradient is the written-out sum's."""

import pytest

from tests.gpu import runs
from tests.gpu.runs import ENGINE, Run
from tests.megatron.runs import torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.megatron]


def test_mamba_layers() -> None:
    reason = runs.why_not(Run(ENGINE))
    if reason:
        pytest.skip(reason)
    for package in ("mamba_ssm", "causal_conv1d"):
        pytest.importorskip(package, exc_type=ImportError)  # also where it was built for another torch
    done = torchrun(["-m", "tests.gpu.mamba_script"])
    assert done.status == 0 and "mamba script: all as expected" in done.output, done.output[-4000:]
