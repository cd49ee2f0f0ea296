# SPDX-License-Identifier: Apache-2.0
"""A HybridModel with Mamba layers, whose kernels need a GPU: SimReg's gradient is the written-out sum's.

As a script: in one process on one GPU, with and without SimReg.
"""

import pytest
import torch

from tests.gpu import runs
from tests.gpu.runs import ENGINE, Run
from tests.megatron.hybrid_script import check
from tests.megatron.own_script import LENGTH, VOCABULARY, start
from tests.megatron.runs import torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.megatron]


def test_mamba_layers() -> None:
    reason = runs.why_not(Run(ENGINE))
    if reason:
        pytest.skip(reason)
    for package in ("mamba_ssm", "causal_conv1d"):
        pytest.importorskip(package, exc_type=ImportError)  # also where it was built for another torch
    done = torchrun(["-m", "tests.gpu.test_mamba"])
    assert done.status == 0 and "mamba script: all as expected" in done.output, done.output[-4000:]


def build_model():
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=3, hidden_size=256, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0,
        gradient_accumulation_fusion=False, is_hybrid_model=True,
    )  # fmt: skip
    return HybridModel(config, hybrid_stack_spec, VOCABULARY, LENGTH, hybrid_layer_pattern="M*-").cuda().train()


if __name__ == "__main__":
    torch.cuda.set_device(0)
    start()
    check(build_model(), "cuda")
    print("mamba script: all as expected")
