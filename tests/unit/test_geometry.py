# SPDX-License-Identifier: Apache-2.0
"""Values of the log: cosines of pairs against a double loop, isotropy, norms and quantiles."""

import math

import pytest
import torch
from torch import Tensor

from simreg_megatron.losses import geometry
from simreg_megatron.losses.geometry import NormSums, PairCosines, norm_table, pair_cosines
from simreg_megatron.parallel.collectives import quantiles_over
from tests.helpers.fixtures import fixture_f1, random_tokens


def naive_pair_cosines(rows: Tensor, labels: Tensor, valid: Tensor, chunk_size: int) -> dict[str, float]:
    result = dict.fromkeys(PairCosines._fields, 0.0)
    num_sequences, num_tokens = labels.shape
    for b in range(num_sequences):
        for start in range(0, num_tokens, chunk_size or num_tokens):
            part = range(start, min(start + (chunk_size or num_tokens), num_tokens))
            wanted = [i for i in part if valid[b, i] and labels[b, i] >= 0]
            chunk = [i for i in wanted if rows[b, i].norm() > 0]
            for i in chunk:
                cosines = {j: float(torch.cosine_similarity(rows[b, i], rows[b, j], dim=0)) for j in chunk if j != i}
                same = [c for j, c in cosines.items() if labels[b, j] == labels[b, i]]
                different = [c for j, c in cosines.items() if labels[b, j] != labels[b, i]]
                result["same_sum"] += sum(same)
                result["same_count"] += len(same)
                result["different_sum"] += sum(different)
                result["different_count"] += len(different)
                result["hardest_sum"] += max(different, default=0.0)
                result["hardest_count"] += bool(different)
    return result


@pytest.mark.parametrize("chunk_size", [0, 2, 4, 100])
def test_equals_the_double_loop(chunk_size: int) -> None:
    rows, labels = random_tokens((3, 11, 4), num_labels=3, seed=1)
    labels[0, 4:8] = 1
    labels[1, 2] = -100
    rows[1, 5] = 0.0
    rows[2, 6] = 0.0
    valid = torch.ones(3, 11, dtype=torch.bool)
    valid[2, 6] = valid[2, 9] = False
    rows[2, 9] = math.nan
    found = pair_cosines(rows, labels, valid=valid, chunk_size=chunk_size)
    for name, expected in naive_pair_cosines(rows, labels, valid, chunk_size).items():
        assert getattr(found, name).item() == pytest.approx(expected, rel=1e-12, abs=1e-12), name


def test_counts_stay_exact_beyond_float32() -> None:
    labels = torch.arange(2).repeat(2, 2100)
    found = pair_cosines(torch.ones(2, 4200, 1), labels)
    assert found.different_count == 2 * 4200 * 2100 > 2**24
    assert found.same_count == 2 * 4200 * 2099
    assert (found.different_sum / found.different_count).item() == pytest.approx(1.0, rel=1e-6)


def test_one_sequence_and_an_empty_one() -> None:
    rows, labels = random_tokens((1, 7, 3), num_labels=2)
    assert pair_cosines(rows[0], labels[0], valid=labels[0] >= 0) == pair_cosines(rows, labels)
    assert all(value == 0 for value in pair_cosines(rows[:, :0], labels[:, :0]))
    masked = pair_cosines(rows, torch.full_like(labels, -100))
    assert all(value == 0 for value in masked)


def test_nan_is_not_hidden() -> None:
    rows, labels = random_tokens((1, 6, 3), num_labels=2, seed=4)
    rows[0, 1, 1] = math.nan
    found = pair_cosines(rows, labels)
    assert found.different_sum.isnan()
    assert found.hardest_sum.isnan()
    assert torch.isfinite(found.different_count)


def isoscore_by_its_steps(rows: Tensor) -> float:
    """The published algorithm: principal axes, normalized variances, isotropy defect, two rescalings."""
    centred = rows - rows.mean(dim=0)
    axes = torch.linalg.svd(centred, full_matrices=False).Vh
    variances = torch.zeros(rows.shape[1], dtype=rows.dtype)
    variances[: len(axes)] = (centred @ axes.mT).var(dim=0)
    width = rows.shape[1]
    normalized = math.sqrt(width) * variances / variances.norm()
    defect = (normalized - 1).norm() / math.sqrt(2 * (width - math.sqrt(width)))
    share = (width - defect**2 * (width - math.sqrt(width))) ** 2 / width**2
    return ((width * share - 1) / (width - 1)).item()


def all_usable(rows: Tensor) -> Tensor:
    return torch.ones(rows.shape[:-1], dtype=torch.bool)


@pytest.mark.parametrize("shape", [(200, 12), (8, 12)], ids=["many tokens", "fewer tokens than features"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_isotropy_is_isoscore_rank_and_mean_cosine(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = (rows * torch.linspace(0.1, 2, 12) + torch.linspace(-1, 1, 12)).to(dtype)
    found = geometry.isotropy(geometry.moments(rows, all_usable(rows)))
    exact, bound = rows.double(), {"rel": 1e-10 if dtype == torch.float64 else 1e-4}
    assert found.score.item() == pytest.approx(isoscore_by_its_steps(exact), **bound)
    covariance = exact.mT.cov()
    rank = covariance.trace() ** 2 / covariance.square().sum()
    assert found.effective_rank.item() == pytest.approx(rank.item(), **bound)
    cosines = torch.nn.functional.normalize(exact, dim=-1) @ torch.nn.functional.normalize(exact, dim=-1).mT
    others = cosines[~torch.eye(len(rows), dtype=torch.bool)]
    assert found.mean_cosine.item() == pytest.approx(others.mean().item(), **bound)


def test_moments_add_up_and_what_does_not_count_may_hold_anything() -> None:
    rows, _ = random_tokens((2, 10, 6), num_labels=3)
    usable = torch.rand(2, 10, generator=torch.Generator().manual_seed(2)) < 0.6
    whole = geometry.moments(rows, usable)
    parts = [geometry.moments(rows[:, part].masked_fill(~usable[:, part, None], torch.nan), usable[:, part])
             for part in (slice(4), slice(4, 10))]  # fmt: skip
    for one, other in zip(geometry.Moments(*map(sum, zip(*parts, strict=True))), whole, strict=True):
        torch.testing.assert_close(one, other)
    assert all(value.isnan() for value in geometry.isotropy(geometry.moments(rows, torch.zeros_like(usable))))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_isotropy_of_equal_tokens_and_of_one_is_nan(dtype: torch.dtype) -> None:
    """Rounding leaves them a little variance, of any rank; tokens that differ a little keep theirs."""
    row = torch.randn(64, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 3
    same = row.expand(4096, 64)
    found = geometry.isotropy(geometry.moments(same.to(dtype), all_usable(same)))
    assert found.score.isnan() and found.effective_rank.isnan()
    assert found.mean_cosine.item() == pytest.approx(1, rel=1e-5), "they have a direction, and it is one"
    of_one = geometry.isotropy(geometry.moments(row[None].to(dtype), all_usable(same[:1])))
    assert all(value.isnan() for value in of_one)
    near = same + 0.2 * torch.randn(same.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = geometry.isotropy(geometry.moments(near.to(dtype), all_usable(near)))
    assert 0.9 < found.score < 1 and 60 < found.effective_rank < 64


def test_mg4_variation_and_difference_of_norms() -> None:
    rows, labels = fixture_f1()
    variation = geometry.coefficient_of_variation(norm_sums(rows, torch.ones(12)))
    assert variation.item() == pytest.approx(0.388330, abs=6e-7)
    of_label = torch.zeros(12, dtype=torch.bool)
    of_label[[0, 2, 5, 10]] = True
    assert labels[of_label].unique().numel() == 1
    found = geometry.cohens_d(norm_sums(rows, of_label), norm_sums(rows, ~of_label))
    assert found.item() == pytest.approx(0.00703023, abs=6e-9)


def test_parts_add_up_and_what_does_not_count_may_hold_anything() -> None:
    rows, _ = fixture_f1()
    counts = torch.arange(12) % 3
    parts = [norm_sums(rows[part], counts[part]) for part in (slice(5), slice(5, 12))]
    for one, other in zip(map(sum, zip(*parts, strict=True)), norm_sums(rows, counts), strict=True):
        torch.testing.assert_close(one, other)
    hidden = rows.clone()
    hidden[counts == 0] = torch.nan
    assert all(map(torch.equal, norm_sums(hidden, counts), norm_sums(rows, counts)))


SHARES = (0.0, 0.1, 0.5, 0.9, 1.0)


@pytest.mark.parametrize("number", [1, 2, 7, 10, 999])
def test_they_are_numbers_in_their_order(number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    values = torch.randn(number, generator=generator) * 10.0 ** torch.randint(-30, 30, (number,), generator=generator)
    values[::3] = values[0]
    ordered = values.sort().values
    expected = torch.stack([ordered[max(0, math.ceil(share * number) - 1)] for share in SHARES])
    mixed = torch.cat([values, torch.full((5,), math.nan)])[torch.randperm(number + 5, generator=generator)]
    assert torch.equal(quantiles_over(mixed, SHARES, []), expected)


def test_infinities_and_zeros_have_their_places() -> None:
    ordered = [-math.inf, -(2.0**-149), 0.0, 2.0**-149, math.inf]
    values = torch.tensor(ordered)[[4, 2, 0, 3, 1]]
    assert quantiles_over(values, (0.2, 0.4, 0.6, 0.8, 1.0), []).tolist() == ordered


def norm_sums(embeddings: Tensor, weights: Tensor) -> NormSums:
    """Compute the sums of embeddings [n..., d] with weights [..., n...], as `norm_table`."""
    return NormSums._make(norm_table(embeddings, weights).unbind(dim=-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lower_precision_input(dtype: torch.dtype) -> None:
    rows, labels = random_tokens((2, 30, 8), num_labels=4, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = pair_cosines(rows.requires_grad_(), labels)
    exact = pair_cosines(rows.detach().double(), labels)
    for value, expected in zip(found, exact, strict=True):
        assert value.dtype == torch.float64
        assert not value.requires_grad
        assert value.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-4)


def test_long_chunks_are_taken_in_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, labels = random_tokens((2, 23, 5), num_labels=4, seed=3)
    valid = torch.rand(2, 23, generator=torch.Generator().manual_seed(1)) < 0.8
    at_once = pair_cosines(rows, labels, valid=valid, chunk_size=10)
    monkeypatch.setitem(geometry._WORKSPACE, "cpu", 1)  # one anchor of each chunk at a time
    for one, other in zip(at_once, pair_cosines(rows, labels, valid=valid, chunk_size=10), strict=True):
        torch.testing.assert_close(one, other)
