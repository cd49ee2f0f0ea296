# SPDX-License-Identifier: Apache-2.0
"""The form in Triton: its kernels in the interpreter against float64, and compiled without a GPU."""

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from simreg_megatron import SimRegConfig
from simreg_megatron.kernels.contrast import Tokens
from simreg_megatron.losses import simreg_loss
from simreg_megatron.losses.simreg import load_kernels
from simreg_megatron.parallel.layout import ShardLayout
from simreg_megatron.parallel.sequence import chunk_views, simreg_over_ranks
from tests.distributed import test_shard as shards
from tests.gpu.tf32 import apart
from tests.helpers import jobs
from tests.helpers.old_torch import OLD_TORCH
from tests.helpers.quick import quick, quick_rows

triton = pytest.importorskip("triton", reason="Triton is not installed")
kernels = pytest.importorskip("simreg_megatron.kernels.triton")

tl = triton.language
interpreted = pytest.mark.skipif(not kernels.INTERPRETS, reason="a GPU is here: tests/gpu runs the kernels on it")

WAYS = {"kept": (256, 256), "one panel": (0, 256), "panels": (0, 16)}
"""Longest chunk whose pairs stay for the backward, and rows of a panel where they do not."""


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in kernels.PAIRS:
        pipeline = {"BK": 16, "PER_SM": 1, "num_warps": 4, "num_stages": 1}
        monkeypatch.setitem(kernels.PAIRS, kind, {"SIDE": 16, **pipeline})
        monkeypatch.setitem(kernels.PRODUCT, kind, {"BM": 16, "BN": 16, **pipeline})
    monkeypatch.setattr(kernels, "WEIGHTS", {"ROWS": 8, "COLUMNS": 32, "num_warps": 4})


def only(*chosen: Any) -> Callable[[Any], bool]:
    """Select the quick cases: Triton's interpreter takes seconds for each."""
    return lambda value: value in chosen


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    longest, panel = WAYS[request.param]
    monkeypatch.setattr(kernels, "LONGEST_KEPT", longest)
    monkeypatch.setattr(kernels, "PANEL", panel)
    return request.param


def clustered(length: int = 45, width: int = 40, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Two sequences of unequal norms, with losses of some 1e-7 at tau 0.01."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 9, (2, length), generator=generator)
    centres = torch.randn(9, width, generator=generator) + 1.5
    rows = centres[labels] + 0.6 * torch.randn(2, length, width, generator=generator)
    return (rows * torch.rand(2, length, 1, generator=generator).add(0.5)).to(dtype), labels


def value_and_gradient(rows: Tensor, labels: Tensor, impl: str, **options: Any) -> tuple[Tensor, Tensor]:
    rows = rows.detach().clone().requires_grad_()
    loss = simreg_loss(rows, labels, impl=impl, **options)
    (loss * 2.0**24).backward()  # in float16 the gradient of so small a loss would be 0
    return loss.detach(), rows.grad


def masks(labels: Tensor) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    documents = torch.arange(labels.shape[1]).div(23, rounding_mode="floor").expand_as(labels)
    return {"valid": torch.rand(labels.shape, generator=generator) < 0.8, "documents": documents}


MASKED = {"chunk_size": 32, "masked": True}


@interpreted
@pytest.mark.parametrize("options", quick([{}, {"chunk_size": 20}, MASKED], only(MASKED)), ids=str)
@pytest.mark.parametrize("way", quick(WAYS, only("kept")), indirect=True)
def test_equals_float64(options: dict[str, Any], way: str) -> None:
    rows, labels = clustered()
    given = {key: value for key, value in options.items() if key != "masked"}
    given |= masks(labels) if options.get("masked") else {}
    loss, grad = value_and_gradient(rows, labels.byte(), "triton", **given)  # a type without negative numbers, too
    expected_loss, expected_grad = value_and_gradient(rows.double(), labels, "reference", **given)
    assert apart(loss, expected_loss) < 2e-5
    assert apart(grad, expected_grad) < 3e-5


def cut_off(numbers: Tensor) -> Tensor:
    """To bfloat16 as Triton's interpreter does it: towards 0. A GPU takes the nearest, which is twice as close."""
    return (numbers.float().view(torch.int32) & ~0xFFFF).view(torch.float32).double()


def of_rounded_weights(rows: Tensor, labels: Tensor, of_pairs: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute the gradient in float64, but for W, the result, and with `of_pairs` P: what the form may round."""
    rows = rows.double()
    scale = 1 / rows.norm(dim=-1, keepdim=True)
    unit = rows * scale
    exponentials = ((unit @ unit.mT - 1) / 0.01).exp().masked_fill(torch.eye(rows.shape[1]).bool(), 0.0)
    same = labels[:, :, None] == labels[:, None]
    total, ratio = 1 + (exponentials * same).sum(-1), (exponentials * ~same).sum(-1)
    ratio = ratio / total
    a = 2.0**24 / labels.numel() / (1 + ratio) / (0.01 * total)
    b = a * ratio
    pairs = of_pairs(exponentials)
    weights = torch.where(same, -(b[:, :, None] + b[:, None]), a[:, :, None] + a[:, None]) * pairs
    weights = cut_off(weights * scale * scale.mT)
    along = weights * (1 + 0.01 * pairs.clamp(min=1e-37).log()) / scale.mT  # the cosines of these pairs
    return cut_off(weights @ rows - along.sum(-1, keepdim=True) * unit)


@interpreted
def test_triton_rounds_pairs_weights_and_the_result_alone() -> None:
    rows, labels = clustered(length=50, dtype=torch.bfloat16)
    loss, grad = value_and_gradient(rows, labels, "triton")
    assert apart(loss, value_and_gradient(rows.double(), labels, "reference")[0]) < 2e-5
    assert apart(grad, of_rounded_weights(rows, labels, cut_off)) < 5e-4
    assert apart(grad, of_rounded_weights(rows, labels, Tensor.clone)) > 1e-3, "the test sees whether P is rounded"


@interpreted
@pytest.mark.parametrize("what", ["one label", "all masked", "one token", "no tokens"])
def test_nothing_to_compare(what: str) -> None:
    rows, labels = clustered(length={"one token": 1, "no tokens": 0}.get(what, 12))
    valid = torch.full(labels.shape, what != "all masked")
    labels = torch.zeros_like(labels) if what == "one label" else labels
    loss, grad = value_and_gradient(rows, labels, "triton", valid=valid)
    assert loss == 0 and grad.shape == rows.shape and (grad == 0).all()


@interpreted
def test_a_usable_row_that_is_not_finite_shows() -> None:
    rows, labels = clustered(length=18)
    rows[0, 7] = torch.nan
    loss, _ = value_and_gradient(rows, labels, "triton")
    assert loss.isnan()
    infinite = torch.full((1, 16), torch.inf)
    alone = simreg_loss(infinite, torch.zeros(1, dtype=torch.long), impl="triton")
    assert alone.isnan(), "nor one without partners, whose norm is infinite"


@interpreted
@pytest.mark.parametrize("anchors", quick([(0, 45), (10, 37), (22, 45)], only((10, 37))))
@pytest.mark.parametrize("way", quick(WAYS, only("panels")), indirect=True)
def test_some_anchors_and_any_strides(anchors: tuple[int, int], way: str) -> None:
    """As on a rank that holds some anchors of a chunk, with hidden states [S, B, D]; the others' coeffs are known."""
    rows, labels = clustered()
    factors = torch.arange(1.0, 46).expand(2, 1, 45)
    grads, own = [], slice(*anchors)
    for name, given in (("triton", rows), ("tiled", rows.double())):
        form = load_kernels(name)
        strided = given.transpose(0, 1).contiguous().transpose(0, 1).unsqueeze(1)
        tokens = Tokens(strided, labels.unsqueeze(1), torch.ones(2, 1, 45, dtype=torch.bool), None)
        coeffs = factors.to(given.dtype) * form.forward(tokens, (0, 45), 0.1, save=False).slopes
        saved = form.forward(tokens, anchors, 0.1, save=True).saved
        grad = given.new_empty(anchors[1] - anchors[0], 2, given.shape[-1]).transpose(0, 1).unsqueeze(1)
        form.backward(strided, saved, coeffs, anchors, 0.1, grad)
        grads.append(grad)
        leaf = given.clone().requires_grad_()
        terms = simreg_loss(leaf, labels, temperature=0.1, reduction="none", impl="reference")
        (terms * factors[:, 0]).sum().backward()
        assert apart(grad.squeeze(1), leaf.grad[:, own]) < 2e-6
    assert apart(*grads) < 2e-6


@interpreted
def test_a_second_backward_is_as_the_first() -> None:
    """The first one writes over what the forward kept."""
    rows, labels = clustered(length=18)
    rows.requires_grad_()
    loss = simreg_loss(rows, labels, temperature=0.1, impl="triton")
    first, second = (torch.autograd.grad(loss, rows, retain_graph=True)[0] for _ in range(2))
    assert apart(second, first) < 1e-6


def check_rank(rank_number: int, layout: ShardLayout, config: SimRegConfig, keeps: bool) -> None:
    """The terms and the gradient of float32 rows on one of several ranks, against one process in float64."""
    tile = {"BK": 16, "PER_SM": 1, "num_warps": 4, "num_stages": 1}
    kernels.PAIRS["fp32"], kernels.PRODUCT["fp32"] = {"SIDE": 16, **tile}, {"BM": 16, "BN": 16, **tile}
    kernels.LONGEST_KEPT, kernels.PANEL = (256, 256) if keeps else (0, 5)
    shard, held, local, *others = shards.part_of(rank_number, layout, torch.float32)
    anchors = layout.anchors(shard.rank)
    terms = simreg_over_ranks(config, shard, local, chunk_views(config, shard, local, *others))
    (terms * shards.pick(shards.sample()["weights"], anchors)).sum().backward()
    expected_terms, expected_grad = shards.whole(config)
    close = {"rtol": 1e-4, "atol": 1e-5, "check_dtype": False}
    torch.testing.assert_close(terms.detach(), shards.pick(expected_terms, anchors), **close)
    torch.testing.assert_close(local.grad.transpose(0, 1), shards.pick(expected_grad, held), **close)


@interpreted
@pytest.mark.distributed
@shards.over("cp2", "sp2", "cp2-tp2", quickly=("cp2", "cp2-tp2"))
@pytest.mark.parametrize("keeps", quick([True, False], only(False)))
def test_triton_over_ranks(tmp_path: Path, layout: ShardLayout, keeps: bool) -> None:
    config = replace(shards.BASE, chunk_size=12, impl="triton")
    shards.run_layout(check_rank, tmp_path, layout, config, keeps)


@triton.jit
def _columns_kernel(guesses, columns, COUNT: tl.constexpr):
    program = tl.arange(0, COUNT)
    tl.store(columns + program, kernels._column_of(program, tl.load(guesses + program)))


@interpreted
@pytest.mark.parametrize("units", [-2, -1, 0, 1, 2])
def test_every_tile_is_found_however_a_square_root_is_rounded(units: int) -> None:
    """sm_90's is approximate; every program of the largest grid there can be, with a root that is `units` off."""
    most = kernels.LONGEST_KEPT // 64
    expected = torch.arange(most).repeat_interleave(torch.arange(1, most + 1))
    root = (8 * torch.arange(len(expected)) + 1).float().sqrt()
    for _ in range(abs(units)):
        root = torch.nextafter(root, torch.tensor(math.copysign(math.inf, units)))
    guesses, count = ((root - 1) * 0.5).int(), triton.next_power_of_2(len(expected))
    if units < 0:
        assert not torch.equal(guesses, expected), "the guess alone is wrong"
    columns = torch.zeros(count, dtype=torch.int32)
    _columns_kernel[(1,)](torch.nn.functional.pad(guesses, (0, count - len(guesses))), columns, COUNT=count)
    assert torch.equal(columns[: len(expected)], expected.int())


def test_a_kernel_runs_where_its_tensors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    current, launched_on = [0], []

    @contextlib.contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        current.append(tensor.get_device())
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(kernels.triton, "set_allocator", lambda _: None, raising=False)  # from 3.4 on
    with FakeTensorMode():
        rows = torch.empty(4, device="cuda:1")
    kernels.run({(1,): lambda *_, **__: launched_on.append(current[-1])}, (1,), rows)
    assert launched_on == [1]


def test_what_it_cannot_do_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, labels = clustered(length=8)
    with pytest.raises(ValueError, match=r"not torch\.float64 of .* use impl 'tiled'"):
        simreg_loss(rows.double(), labels, impl="triton")
    with pytest.raises(ValueError, match="impl 'triton' supports only similarity 'cosine'"):
        simreg_loss(rows, labels, impl="triton", similarity="dot")
    with pytest.raises(ValueError, match=r"not torch\.float16 of .* use impl 'tiled'"):
        simreg_loss(rows.half(), labels, impl="triton")
    with pytest.raises(
        ValueError, match=r"a width that is a multiple of 4, not torch\.float32 of width 39 on cpu: use impl 'tiled'"
    ):
        simreg_loss(rows[..., :39], labels, impl="triton")
    monkeypatch.setattr(kernels, "INTERPRETS", False)
    with pytest.raises(ValueError, match=r"on a CUDA device, .* on cpu: use impl"):
        simreg_loss(rows, labels, impl="triton")
    monkeypatch.delattr(kernels.tl, "make_tensor_descriptor")
    with pytest.raises(ValueError, match=r"needs Triton 3\.4 or newer"):
        kernels.TritonKernels()


CARDS = quick_rows([(80, 163), (90, 227)], lambda row: row[0] == 90)


@pytest.mark.skipif(OLD_TORCH, reason="the Triton of an older torch compiles by another interface")
@pytest.mark.parametrize("which", ["one-of-each", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("architecture", "most_shared_kib"), CARDS)
def test_compiled_without_a_gpu(architecture: int, most_shared_kib: int, which: str) -> None:
    """Every configuration fits into shared memory; registers spill only for odd widths, and in `_pairs` on sm_90.

    With that spill two of its tiles share a multiprocessor, which took 22 % less time on an H200.
    """
    compiled = jobs.run(
        [sys.executable, "-m", "tests.helpers.compile_kernels", str(architecture), which],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        cwd=Path(__file__).resolve().parents[2],
    )
    assert compiled.returncode == 0, compiled.stderr[-2000:]
    found = [json.loads(line) for line in compiled.stdout.splitlines()]
    launched = {"_ids_and_norms", "_pairs", "_terms", "_weights", "_product"}
    assert {kernel["kernel"] for kernel in found} == launched
    for kernel in found:
        may_spill = "odd width" in kernel["variant"] or (kernel["kernel"] == "_pairs" and architecture == 90)
        most_spilled = 1200 if may_spill else 64
        assert max(kernel["spilled_bytes"], kernel["stack_bytes"]) <= most_spilled, kernel
        assert 0 <= kernel["shared_bytes"] <= most_shared_kib * 1024, kernel
        if architecture == 90 and kernel["kernel"] in ("_pairs", "_product"):
            assert kernel["uses_wgmma"], kernel


@interpreted
@pytest.mark.parametrize("way", quick(WAYS, only("kept")), indirect=True)
def test_what_is_not_usable_may_hold_anything(way: str) -> None:
    rows, labels = clustered(length=25)
    valid = torch.ones_like(labels, dtype=torch.bool)
    valid[0, 5:9] = valid[1, -3:] = False
    rows[1, 20] = 0.0
    expected = value_and_gradient(rows.double(), labels, "reference", valid=valid)
    rows[~valid] = 1e25  # finite, unlike its products, as Megatron's own masked loss must be
    loss, grad = value_and_gradient(rows, labels, "triton", valid=valid)
    assert apart(loss, expected[0]) < 2e-5 and apart(grad, expected[1]) < 3e-5
    assert (grad[~valid] == 0).all() and (grad[1, 20] == 0).all()
    assert grad[valid].ne(0).any()
