# SPDX-License-Identifier: Apache-2.0
"""MIC against independently computed numbers (facts MI-1 to MI-4), limits, and invariances; SimReg on prefixes."""

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from simreg_megatron.contrib import mic
from simreg_megatron.contrib.mic import MICOptions, pools_tokens
from simreg_megatron.contrib.prefixes_ce import default_prefixes
from simreg_megatron.losses import mic_loss
from tests.helpers.fixtures import fixture_f1
from tests.helpers.quick import quick
from tests.unit.test_simreg_facts import assert_prints

NOTHING = MICOptions(prefixes=(2,), correlation=0, variance=0, balance=0, uniformity=0)


def sequences(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """F1 as three sequences of four tokens, the last one of the second is masked."""
    valid = torch.ones(3, 4, dtype=torch.bool)
    valid[1, 3] = False
    return fixture_f1(dtype)[0].view(3, 4, 6), valid


def part(rows: Tensor, valid: Tensor | None = None, chunk_size: int = 0, **options: object) -> Tensor:
    return mic_loss(rows, options=replace(NOTHING, **options), valid=valid, chunk_size=chunk_size)


def check(found: Tensor, printed: str) -> None:
    if found.dtype == torch.float64:
        assert_prints(found, printed)
    assert found.item() == pytest.approx(float(printed), rel=1e-5, abs=2e-6)


both_types = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])


MI1_AND_MI2 = [
    ("sequence", 2, ("0.0911610", "0.0498571", "0.00955318"), "0.954961"),
    ("sequence", 4, ("0.122818", "0.0743761", "0.0188135"), "0.912836"),
    ("batch", 2, ("0.145934", "0.0860563", "0.0183345"), "0.733292"),
    ("batch", 4, ("0.130022", "0.0758878", "0.0184175"), "0.680400"),
]


@both_types
@pytest.mark.parametrize(("norm_scope", "prefix", "correlations", "variance"), MI1_AND_MI2)
def test_mi1_and_mi2(norm_scope: str, prefix: int, correlations, variance: str, dtype: torch.dtype) -> None:
    rows, valid = sequences(dtype)
    given = {"prefixes": (prefix,), "norm_scope": norm_scope}
    for threshold, printed in zip((0, 0.1, 0.3), correlations, strict=True):
        check(part(rows, valid, correlation=1, threshold=threshold, **given), printed)
    check(part(rows, valid, variance=1, **given), variance)
    assert abs(part(rows, variance=1, **given) - float(variance)) > 1e-3, "the mask counts"


MI3 = [
    ("sequence", 2, 2, "0.420647", "-0.365470"),
    ("sequence", 4, 2, "0.685764", "-0.687798"),
    ("sequence", 6, 2, "0.811329", "-1.346741"),
    ("token", 2, 2, "0.202265", "-0.825796"),
    ("token", 4, 2, "0.214410", "-1.670437"),
    ("token", 6, 2, "0.274093", "-2.074020"),
    ("token", 6, 1, "0.274093", "-1.191266"),
]


@both_types
@pytest.mark.parametrize(("pool", "prefix", "t", "balance", "uniformity"), MI3)
@pytest.mark.parametrize("slab", [16 << 20, 1], ids=["one slab", "row by row"])
def test_mi3(pool: str, prefix: int, t: float, balance: str, uniformity: str, dtype, slab: int, monkeypatch) -> None:
    monkeypatch.setattr(mic, "_SLAB", slab)
    rows, valid = sequences(dtype)
    rows = torch.cat([rows, rows[..., :1]], dim=-1)  # a prefix leaves something over
    given = {"prefixes": (prefix,), "pool": pool, "t": float(t)}
    valid = valid if pool == "sequence" else None
    check(part(rows, valid, balance=1, **given), balance)
    check(part(rows, valid, uniformity=1, **given), uniformity)


def test_a_batch_without_tokens_is_zero() -> None:
    assert mic_loss(torch.randn(2, 3, 8), torch.full((2, 3), -100), options=MICOptions(prefixes=(4,))) == 0


def test_sequences_that_are_all_alike() -> None:
    constant = torch.ones(3, 5, 6, dtype=torch.float64, requires_grad=True)
    assert part(constant, correlation=1) == 0 and part(constant, variance=1) == 1.5
    mic_loss(constant, options=MICOptions(prefixes=(2,))).backward()
    assert constant.grad.isfinite().all()


@pytest.mark.parametrize("t", [2.0, 20.0])
@pytest.mark.parametrize("pool", ["sequence", "token"])
@pytest.mark.parametrize("slab", [16 << 20, 1], ids=["one slab", "row by row"])
def test_no_pair_is_lost_in_the_rounding_of_a_row_with_itself(t: float, pool: str, slab: int, monkeypatch) -> None:
    """float32 as float64, also where all pairs together are far below the 1 that a row with itself would add."""
    monkeypatch.setattr(mic, "_SLAB", slab)
    for seed in range(20):
        rows = torch.randn(2, 2, 9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        given = {"prefixes": (8,), "pool": pool, "t": t, "uniformity": 1}
        assert part(rows.float(), **given).item() == pytest.approx(part(rows, **given).item(), rel=2e-5, abs=2e-5)
    opposite = torch.tensor([[1.0, 2.0, 0.0], [-1.0, -2.0, 0.0]])
    assert part(opposite, pool="token", prefixes=(2,), uniformity=1).item() == pytest.approx(-7.997023, abs=2e-6)


def test_a_feature_that_never_changes_has_no_correlation() -> None:
    """Its mean is rounded, and what float32 leaves of it must not be taken for a deviation."""
    rows = torch.randn(1, 2048, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows[..., [0, 2, 5, 7]] = torch.tensor([100.1, -73.3, 55.7, 91.9], dtype=torch.float64)
    for name in ("correlation", "variance"):
        found, exact = (part(of, prefixes=(4,), **{name: 1}).item() for of in (rows.float(), rows))
        assert found == pytest.approx(exact, rel=1e-5, abs=1e-9)
    assert part(rows.float(), prefixes=(4,), correlation=1) < 1e-3
    broken = rows.float()
    broken[0, 3, 0] = torch.nan
    assert part(broken, prefixes=(4,), variance=1).isnan()
    faint = rows.float()
    faint[0, ::2, 0] += 0.01
    faint[0, ::2, 7] += 0.01
    assert part(faint, prefixes=(4,), correlation=1) > 0.01, "what does change counts, however little"


@pytest.mark.parametrize("pool", mic.POOLS)
@pytest.mark.parametrize("norm_scope", mic.NORM_SCOPES)
@pytest.mark.parametrize("slab", quick([16 << 20, 1], lambda slab: slab == 1), ids=["one slab", "row by row"])
@pytest.mark.parametrize("fast", quick([True, False], bool), ids=["one direction", "all"])
def test_gradient_is_the_derivative(pool: str, norm_scope: str, slab: int, fast: bool, monkeypatch) -> None:
    monkeypatch.setattr(mic, "_SLAB", slab)
    rows, valid = sequences()
    options = MICOptions(prefixes=(2, 4), pool=pool, norm_scope=norm_scope)
    hidden = rows.masked_fill(~valid.unsqueeze(-1), torch.nan)
    loss = mic_loss(hidden.requires_grad_(), options=options, valid=valid, chunk_size=2)
    loss.backward()
    assert torch.equal(loss.detach(), mic_loss(rows, options=options, valid=valid, chunk_size=2))
    assert not hidden.grad[~valid].any() and hidden.grad[valid].any()
    of = functools.partial(mic_loss, options=options, valid=valid, chunk_size=2)
    assert torch.autograd.gradcheck(of, rows.clone().requires_grad_(), fast_mode=fast)


def test_each_chunk_is_pooled_separately() -> None:
    rows, valid = sequences()
    means = torch.stack([rows[b, part][valid[b, part]].mean(0) for b in range(3) for part in (slice(2), slice(2, 4))])
    given = {"prefixes": (3,), "uniformity": 1, "balance": 1}
    expected = part(means, pool="token", **given)
    torch.testing.assert_close(part(rows, valid, chunk_size=2, pool="chunk", **given), expected)
    assert abs(part(rows, valid, pool="sequence", **given) - expected) > 1e-3


def test_a_mean_alone_makes_way_for_tokens() -> None:
    rows, _ = fixture_f1()
    alone, tokens = (part(rows, pool=pool, uniformity=1) for pool in ("sequence", "token"))
    assert alone == tokens and pools_tokens(MICOptions(), 1, 12, 0) and not pools_tokens(MICOptions(), 1, 12, 6)
    assert part(rows[:1], pool="token", uniformity=1, balance=1) == 0, "one token has none either"
    empty = mic_loss(rows.view(3, 4, 6), options=MICOptions(prefixes=(2,)), valid=torch.zeros(3, 4, dtype=torch.bool))
    assert empty.isfinite()


def test_prefixes_follow_the_width() -> None:
    assert default_prefixes(192) == (16, 32, 64) and default_prefixes(6) == (3,)
    with pytest.raises(ValueError, match="from 1 to 5 features of 6, got 6"):
        mic_loss(torch.ones(1, 4, 6), options=MICOptions(prefixes=(2, 6)))
    with pytest.raises(ValueError, match=r"threshold must be from 0 to 0\.99, got -1"):
        mic_loss(torch.ones(1, 4, 6), options=MICOptions(prefixes=(2,), threshold=-1))
