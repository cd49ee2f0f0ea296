# SPDX-License-Identifier: Apache-2.0
"""In Megatron's own loop: sigmoid's scalars are trained in every layout, and prefixes-ce with fused gradients."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from tests.megatron import runs
from tests.megatron.parity.cells import DISTRIBUTED, DP2, ONE, OVERLAP_GRADS, TRUNCATED, Cell, Part, part
from tests.megatron.parity.run import Bench, fits

STEPS = ("--train-iters", "4", "--eval-iters", "0", "--lr-decay-style", "constant")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "names"),
    [("", ("log_t", "bias")), (",pairs=hidden-head,adapter=yes", ("log_t", "bias", "adapter"))],
    ids=["labels", "hidden-head"],
)
def test_scalars_are_trained_in_every_layout(options: str, names: tuple[str, ...], data_flags, tmp_path: Path) -> None:
    """A model that is split draws other weights from its seed, so a single process writes the start."""
    objective = "--simreg-objective sigmoid --simreg-lambda 0.1 --simreg-objective-options pair_reduction=balanced"
    flags = (*data_flags, *STEPS, *f"{objective}{options}".split(), "--simreg-chunk-size", "24")
    place = ("--save", str(tmp_path / "saved"), "--save-interval", "2", "--exit-interval", "2")
    runs.train(tmp_path / "start", (*flags, *place))
    flags = (*flags, "--load", str(tmp_path / "saved"))
    alone = runs.train(tmp_path / "alone", flags)
    for name in names:
        assert alone.grads[f"simreg_sigmoid.{name}"].item() != 0
    for layout in ("--tensor-model-parallel-size 2 --sequence-parallel", "--context-parallel-size 2", ""):
        got = runs.train(tmp_path / f"split{len(layout)}", (*flags, *layout.split()), processes=2)
        gap = runs.difference(alone, got)
        assert fits(gap, Cell.bound), (layout, gap)


@pytest.mark.parametrize(
    ("model", "layout", "ignores"),
    [
        ("dense", DP2 + DISTRIBUTED + OVERLAP_GRADS, True),
        # The embedding's gradient comes through autograd here, so Megatron looks at it, and brings zeros of its own.
        pytest.param("tied", ONE, False, marks=pytest.mark.slow),
    ],
    ids=["dense", "tied"],
)
def test_a_second_use_of_the_head_with_fused_gradients(model: str, layout: Part, ignores: bool, bench: Bench) -> None:
    """Megatron then ignores what autograd brings for the weight, so the objective must add its own part itself."""
    expected = bench.compute(model, ONE, TRUNCATED, part(""))
    patches = ("test_objectives:in_main_grad", "test_objectives:in_main_grad_unseen")
    found = [bench.compute(model, layout, TRUNCATED, part(""), patch) for patch in patches]
    fused, lost = (runs.difference(expected, run) for run in found)
    assert fused.norm < 1e-5 and fused.grad < 1e-5, fused
    assert (lost.grad > 1e-2) == ignores, lost
    assert not ignores or lost.parameter == "output_layer.weight"


# Gradient accumulation fusion without Apex's kernel: layers add their weights' gradients to main_grad -----------------


def in_main_grad() -> None:
    """Ignore autograd's gradient of such a weight from then on, as on GPUs."""
    from megatron.core.tensor_parallel import layers

    def accumulate(rows: Tensor, grad: Tensor, main_grad: Tensor) -> None:
        main_grad.addmm_(grad.mT, rows)

    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)
    initialize = layers.ColumnParallelLinear.__init__

    def fusing(layer: Any, *args: Any, **kwargs: Any) -> None:
        initialize(layer, *args, **kwargs)
        layer.gradient_accumulation_fusion = True

    layers.ColumnParallelLinear.__init__ = fusing


def in_main_grad_unseen() -> None:
    """The same, and the truncated output layer leaves its gradient to autograd."""
    from simreg_megatron.contrib import prefixes_ce

    in_main_grad()
    truncated = prefixes_ce.TruncatedHead
    prefixes_ce.TruncatedHead = lambda *args: truncated(*args)._replace(fuses=False)
