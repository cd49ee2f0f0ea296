# SPDX-License-Identifier: Apache-2.0
"""SIGReg against independently computed numbers (facts SG-1 to SG-7), closed forms, and a written-out loop."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor

from simreg_megatron import SimRegConfig
from simreg_megatron.losses import sigreg, sigreg_loss
from simreg_megatron.losses.sigreg import knots, random_directions, statistic
from tests.helpers.fixtures import fixture_f1, random_tokens
from tests.unit.test_simreg_facts import assert_prints

CPU = torch.device("cpu")


def mean_cosine(t: float, width: int) -> float:
    """E cos(t X), X one entry of an even unit vector: 0F1(; d/2; -t^2 / 4), a series."""
    term, total = 1.0, 0.0
    for k in range(200):
        total += term
        term *= -t * t / 4 / ((k + 1) * (width / 2 + k))
    return total


def fixture_directions(dtype: torch.dtype = torch.float64) -> Tensor:
    i, m = torch.arange(1, 7, dtype=torch.float64)[:, None], torch.arange(1, 5, dtype=torch.float64)
    columns = (1.7 * i * m + 0.3 * m).cos()
    return (columns / columns.norm(dim=0)).mT.to(dtype)


@pytest.mark.parametrize(
    ("width", "fourth", "sixth"), [(768, 2.992207792, 14.883520624), (1024, 2.994152047, 14.912508249)]
)
def test_sg2_moments_of_scaled_rows(width: int, fourth: float, sixth: float) -> None:
    """Moments of our own scaled rows, over directions: a sample of 2^18 projections."""
    assert 3 * width / (width + 2) == pytest.approx(fourth, abs=6e-10)
    assert 15 * width**2 / ((width + 2) * (width + 4)) == pytest.approx(sixth, abs=6e-10)
    rows = torch.randn(1, 512, width, generator=torch.Generator().manual_seed(1))
    scaled = sigreg.normalized(rows, torch.ones(1, 512, dtype=torch.bool), "sqrt-d")
    projected = scaled @ random_directions(512, width, seed=0, iteration=0, device=CPU).mT
    assert projected.square().mean().item() == pytest.approx(1.0, rel=2e-2)
    assert projected.pow(4).mean().item() == pytest.approx(fourth, rel=4e-2)


@pytest.mark.parametrize(
    ("estimator", "width", "unscaled", "scaled"),
    [
        ("mean", 768, "0.460338", 1.8868e-7),
        ("mean", 1024, "0.461216", 1.0607e-7),
        ("mean", 2048, "0.462537", 2.6491e-8),
        ("mean", 4096, "0.463198", 6.6194e-9),
        ("epps-pulley", 768, "0.400040", 1.9880e-7),
        ("epps-pulley", 1024, "0.400541", 1.1178e-7),
    ],
)
def test_sg3_an_infinite_even_sample(estimator: str, width: int, unscaled: str, scaled: float) -> None:
    def of(factor: float) -> Tensor:
        cosines = torch.tensor([mean_cosine(factor * t, width) for t in knots(estimator)], dtype=torch.float64)
        waves = torch.stack([cosines, torch.zeros_like(cosines)])[None, None, ..., None]
        return statistic(waves, torch.ones(1, 1), estimator)

    assert_prints(of(1.0), unscaled)
    assert of(math.sqrt(width)).item() == pytest.approx(scaled, rel=5e-5)


@pytest.mark.parametrize(("normalize", "width", "printed"), [("sqrt-d", 768, 0.691942), ("unit", 768, 0.464360)])
def test_sg3_collapse(normalize: str, width: int, printed: float) -> None:
    """All rows equal: the scaled loss is far from its even value, the unscaled one within a hundredth of it."""
    row = torch.randn(1, width, generator=torch.Generator().manual_seed(0)).expand(5, width)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        directions = random_directions(20000, width, seed=1, iteration=2, device=CPU)
        found = sigreg_loss(row, directions=directions, normalize=normalize)
    assert found.item() == pytest.approx(printed, rel=5e-3)
    at = knots("mean")
    factor = math.sqrt(width) if normalize == "sqrt-d" else 1.0
    exact = sum(1 - 2 * math.exp(-t * t / 2) * mean_cosine(factor * t, width) + math.exp(-t * t) for t in at) / len(at)
    assert exact == pytest.approx(printed, abs=6e-7)


@pytest.mark.parametrize(("estimator", "floor"), [("mean", 0.691807 / 32), ("epps-pulley", 1.052464)])
def test_sg4_the_floor_of_a_finite_sample(estimator: str, floor: float) -> None:
    """Rows that are normal already, in samples of 32: what is left is noise of a known size."""
    rows = torch.randn(1, 32 * 500, 16, generator=torch.Generator().manual_seed(4))
    directions = random_directions(16, 16, seed=0, iteration=0, device=CPU)
    found = sigreg_loss(rows, directions=directions, estimator=estimator, normalize="none", chunk_size=32)
    assert found.item() == pytest.approx(floor, rel=3e-2)
    weights = sigreg._weights(torch.tensor(knots(estimator), dtype=torch.float64), estimator)
    assert weights.sum().item() == pytest.approx({"mean": 1.0, "epps-pulley": 2.499666}[estimator], abs=6e-7)


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        ({}, "0.160042"),
        ({"normalize": "unit"}, "0.336803"),
        ({"estimator": "epps-pulley"}, "4.740157"),
        ({"estimator": "epps-pulley", "normalize": "unit"}, "4.539726"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.filterwarnings("ignore:normalize=unit")
def test_sg5(options: dict, printed: str, dtype: torch.dtype) -> None:
    found = sigreg_loss(fixture_f1(dtype)[0], directions=fixture_directions(dtype), **options)
    if dtype == torch.float64:
        assert_prints(found, printed)
    assert found.dtype == dtype and found.item() == pytest.approx(float(printed), rel=4e-6)


def test_sg5_gradient() -> None:
    rows = fixture_f1()[0].requires_grad_()
    sigreg_loss(rows, directions=fixture_directions()).backward()
    assert_prints(rows.grad.norm(), "0.177748")
    printed = [-0.00960769, 0.01826635, 0.04063865, 0.01987811, 0.02243121, -0.00721567]
    assert rows.grad[0].tolist() == pytest.approx(printed, abs=6e-9)


@pytest.mark.filterwarnings("ignore:normalize=unit")
def test_sg6_without_the_scale_a_step_goes_towards_collapse() -> None:
    """Even rows: each step of the unscaled loss lengthens the projections that it sees, of the scaled one not."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(64, 768, generator=generator, dtype=torch.float64)
    directions = random_directions(16, 768, seed=0, iteration=0, device=CPU).double()

    def share_of_longer(normalize: str) -> float:
        rows = start.clone().requires_grad_()
        sigreg_loss(rows, directions=directions, normalize=normalize).backward()
        units, moved = (sigreg.unit_rows(given) for given in (start, start - 1e-3 * rows.grad))
        before, after = (given @ directions.mT for given in (units, moved))
        return (after.square().sum(dim=-1) > before.square().sum(dim=-1)).double().mean().item()

    assert share_of_longer("unit") == 1.0
    assert share_of_longer("sqrt-d") < 0.9
    assert mean_cosine(2.0, 768) - math.exp(-2.0) == pytest.approx(0.862064, abs=6e-7)


def test_sg7_lengths_are_not_seen_and_turns_by_the_directions_only() -> None:
    rows, _ = fixture_f1()
    directions = fixture_directions()
    loss = sigreg_loss(rows, directions=directions)
    lengths = torch.rand(12, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.1
    torch.testing.assert_close(sigreg_loss(rows * lengths, directions=directions), loss)
    assert abs(sigreg_loss(rows * lengths, directions=directions, normalize="none") - loss) > 1e-3
    turn = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))).Q
    torch.testing.assert_close(sigreg_loss(rows @ turn, directions=directions @ turn), loss)
    assert abs(sigreg_loss(rows @ turn, directions=directions) - loss) > 1e-3


def written_out(rows: Tensor, directions: Tensor, estimator: str) -> Tensor:
    """One sample, one direction and one knot after the other; rows as they are."""
    at, total = knots(estimator), torch.zeros((), dtype=rows.dtype)
    step = at[1]
    for direction in directions:
        for i, t in enumerate(at):
            waves = torch.exp(1j * t * (rows @ direction)).mean()
            gap = (waves - math.exp(-t * t / 2)).abs() ** 2
            if estimator == "mean":
                total = total + gap / len(at)
            else:
                ends = step if i in (0, len(at) - 1) else 2 * step
                total = total + gap * ends * math.exp(-t * t / 2) * len(rows)
    return total / len(directions)


@pytest.mark.parametrize("estimator", sigreg.ESTIMATORS)
@pytest.mark.parametrize("normalize", ["sqrt-d", "none"])
def test_chunks_and_masks_are_samples_of_their_own(
    estimator: str, normalize: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sigreg, "_WORKSPACE", 3 * 2 * 8 * 4)  # tiles of three tokens
    rows, labels = random_tokens((2, 14, 6), num_labels=4)
    valid = torch.rand(2, 14, generator=torch.Generator().manual_seed(2)) < 0.7
    labels[0, 3], rows[1, 2] = -100, 0.0
    valid[1, 6:12] = False
    usable = valid & (labels >= 0)
    usable[1, 2] = False
    rows = rows.masked_fill(~valid.unsqueeze(-1), torch.nan)
    rows[0, 3] = torch.nan
    one, other = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    options = {"directions": fixture_directions(), "estimator": estimator}
    terms = sigreg_loss(one, labels, valid=valid, chunk_size=6, normalize=normalize, reduction="none", **options)
    expected = torch.zeros(2, 14, dtype=torch.float64)
    for b in range(2):
        for part in (slice(0, 6), slice(6, 12), slice(12, 14)):
            sample = other[b, part][usable[b, part]]
            if normalize == "sqrt-d":
                sample = sample / sample.norm(dim=-1, keepdim=True) * math.sqrt(6)
            if len(sample):
                expected[b, part] = torch.where(usable[b, part], written_out(sample, **options), 0.0)
    torch.testing.assert_close(terms, expected)
    weights = torch.rand(2, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    (terms * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(one.grad, other.grad.nan_to_num(0.0))
    assert not one.grad[~usable].any()
    again = sigreg_loss(rows, labels, valid=valid, chunk_size=6, normalize=normalize, **options)
    torch.testing.assert_close(again, (terms.sum() / usable.sum()).detach())


def test_directions_follow_from_seed_and_iteration_alone() -> None:
    state = torch.get_rng_state()

    def drawn(seed: int, iteration: int) -> Tensor:
        return random_directions(64, 8, seed=seed, iteration=iteration, device=CPU)

    first = drawn(0, 5)
    assert torch.equal(torch.get_rng_state(), state), "no other generator is touched"
    assert first.norm(dim=-1).sub(1).abs().max() < 1e-6
    others = [drawn(0, 6), drawn(1, 5), drawn(1 << 32, 5), drawn(5, 0)]
    assert all((first * other).sum(-1).abs().mean() < 0.6 for other in others)
    assert first.mean(0).abs().max() < 0.15, "even"
    again = drawn(0, 5)
    assert again is not first and torch.equal(first, again), "drawn again: the others have taken its place"


def test_members_are_kept_as_bits_not_as_numbers() -> None:
    """[b, s, n] of them grow with the square of the tokens: what autograd keeps has one byte each."""
    rows, _ = random_tokens((1, 64, 6), num_labels=4)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        sigreg_loss(rows.requires_grad_(), directions=fixture_directions(), chunk_size=2)
    assert {tensor.dtype for tensor in kept if tensor.shape == (1, 32, 64)} == {torch.bool}


def test_a_state_that_is_not_finite_shows() -> None:
    rows, _ = fixture_f1()
    rows[3, 2] = torch.inf
    assert sigreg_loss(rows, directions=fixture_directions()).isnan()
    assert sigreg_loss(rows[:0], directions=fixture_directions()) == 0


def test_what_cannot_be_is_refused() -> None:
    rows, _ = fixture_f1()
    with pytest.raises(ValueError, match=r"directions must be \[K > 0, 6\], got \[4, 5\]"):
        sigreg_loss(rows, directions=fixture_directions()[:, :5])
    with pytest.raises(ValueError, match=r"directions must be \[K > 0, 6\], got \[0, 6\]"):
        sigreg_loss(rows, directions=fixture_directions()[:0])
    with pytest.raises(ValueError, match="directions are on meta but embeddings on cpu"):
        sigreg_loss(rows, directions=fixture_directions().to("meta"))
    for name in ("estimator", "normalize", "reduction"):
        with pytest.raises(ValueError, match=f"{name} 'other' is not available"):
            sigreg_loss(rows, directions=fixture_directions(), **{name: "other"})
    with pytest.warns(UserWarning, match="hardly separates an even spread from a collapse"):
        sigreg_loss(rows, directions=fixture_directions(), normalize="unit")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"temperature": 0.1}, "objective sigreg has no temperature"),
        ({"scope": "local"}, "scope local has no effect on objective sigreg"),
        ({"objective_options": "directions=2.5"}, "directions must be a whole number of 0 or more, not '2.5'"),
        ({"objective_options": "estimator=median"}, "estimator must be one of mean, epps-pulley"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        SimRegConfig(lambda_=1, objective="sigreg", **settings)
