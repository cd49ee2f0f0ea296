# SPDX-License-Identifier: Apache-2.0
"""SIGReg against independently computed numbers (facts SG-1 to SG-7), closed forms, and a written-out loop."""

import math

import pytest
import torch
from torch import Tensor

from simreg_megatron.contrib import sigreg
from simreg_megatron.contrib.sigreg import knots, random_directions
from simreg_megatron.losses import sigreg_loss
from tests.helpers.fixtures import fixture_f1, random_tokens
from tests.unit.test_simreg_facts import assert_prints

CPU = torch.device("cpu")


def fixture_directions(dtype: torch.dtype = torch.float64) -> Tensor:
    i, m = torch.arange(1, 7, dtype=torch.float64)[:, None], torch.arange(1, 5, dtype=torch.float64)
    columns = (1.7 * i * m + 0.3 * m).cos()
    return (columns / columns.norm(dim=0)).mT.to(dtype)


SG5 = [
    ({}, "0.160042"),
    ({"normalize": "unit"}, "0.336803"),
    ({"estimator": "epps-pulley"}, "4.740157"),
    ({"estimator": "epps-pulley", "normalize": "unit"}, "4.539726"),
]


@pytest.mark.parametrize(("options", "printed"), SG5)
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
def test_chunks_and_masks_are_samples_of_their_own(estimator: str, normalize: str, monkeypatch) -> None:
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

    with torch.inference_mode():  # of an evaluation, say: later steps train on the same directions
        first = drawn(0, 5)
    assert not first.is_inference()
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


def test_a_changed_draw_is_not_the_next_ones() -> None:
    drawn = random_directions(3, 5, seed=1, iteration=2, device=CPU)
    kept = drawn.clone()
    drawn.zero_()
    assert torch.equal(random_directions(3, 5, seed=1, iteration=2, device=CPU), kept)


def test_what_cannot_be_is_refused() -> None:
    rows, _ = fixture_f1()
    with pytest.raises(ValueError, match=r"directions must be \[K > 0, 6\], got \[4, 5\]"):
        sigreg_loss(rows, directions=fixture_directions()[:, :5])
    with pytest.raises(ValueError, match=r"directions must be \[K > 0, 6\], got \[0, 6\]"):
        sigreg_loss(rows, directions=fixture_directions()[:0])
    for name in ("estimator", "normalize", "reduction"):
        with pytest.raises(ValueError, match=f"{name} 'other' is not available"):
            sigreg_loss(rows, directions=fixture_directions(), **{name: "other"})
    with pytest.warns(UserWarning, match="hardly separates an even spread from a collapse"):
        sigreg_loss(rows, directions=fixture_directions(), normalize="unit")
