# SPDX-License-Identifier: Apache-2.0
"""pair_cosines against a double loop, and the angle of a mean cosine."""

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from simreg_megatron import geometry
from simreg_megatron.geometry import PairCosines, mean_angle_degrees, pair_cosines
from tests.helpers.fixtures import fixture_f1, random_tokens


def naive_pair_cosines(rows: Tensor, labels: Tensor, valid: Tensor, chunk_size: int) -> dict[str, float]:
    result = dict.fromkeys(PairCosines._fields, 0.0)
    num_sequences, num_tokens = labels.shape
    for b in range(num_sequences):
        for start in range(0, num_tokens, chunk_size or num_tokens):
            part = range(start, min(start + (chunk_size or num_tokens), num_tokens))
            wanted = [i for i in part if valid[b, i] and labels[b, i] >= 0]
            chunk = [i for i in wanted if rows[b, i].norm() > 0]
            result["zero_norm_count"] += len(wanted) - len(chunk)
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
                result["no_negative_count"] += not different
                result["valid_count"] += 1
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
    assert found.zero_norm_count == 1


def test_fixture() -> None:
    rows, labels = fixture_f1()
    found = pair_cosines(rows, labels)
    assert (found.same_sum / found.same_count).item() == pytest.approx(0.228242, abs=5.1e-7)
    assert (found.different_sum / found.different_count).item() == pytest.approx(0.320588, abs=5.1e-7)
    everything = (found.same_sum + found.different_sum) / (found.same_count + found.different_count)
    assert everything.item() == pytest.approx(0.306596, abs=5.1e-7)
    assert (found.same_count, found.different_count) == (20, 112)


def test_counts_stay_exact_beyond_float32() -> None:
    labels = torch.arange(2).repeat(2, 2100)
    found = pair_cosines(torch.ones(2, 4200, 1), labels)
    assert found.different_count == 2 * 4200 * 2100 > 2**24
    assert found.same_count == 2 * 4200 * 2099
    assert (found.different_sum / found.different_count).item() == pytest.approx(1.0, rel=1e-6)


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


def test_the_host_never_waits_for_values() -> None:
    with FakeTensorMode():
        found = pair_cosines(torch.empty(2, 13, 5), torch.zeros(2, 13, dtype=torch.long), chunk_size=4)
        assert found.same_sum.shape == ()


def test_bad_arguments_are_the_loss_s_own() -> None:
    with pytest.raises(ValueError, match="chunk_size"):
        pair_cosines(torch.ones(4, 2), torch.zeros(4, dtype=torch.long), chunk_size=1)
    with pytest.raises(ValueError, match="labels must have the shape"):
        pair_cosines(torch.ones(4, 2), torch.zeros(5, dtype=torch.long))


@pytest.mark.parametrize(
    ("cosine", "degrees"),
    [
        (1.0, 0.0),
        (0.0, 90.0),
        (-1.0, 180.0),
        (0.480223, 61.3),
        (0.275637, 74.0),
        (1.0000001, 0.0),
        (-1.1, 180.0),
    ],
)
def test_mean_angle(cosine: float, degrees: float) -> None:
    assert mean_angle_degrees(cosine) == pytest.approx(degrees, abs=1e-4)


def test_mean_angle_of_nan_is_nan() -> None:
    assert math.isnan(mean_angle_degrees(math.nan))


def test_long_chunks_are_taken_in_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, labels = random_tokens((2, 23, 5), num_labels=4, seed=3)
    valid = torch.rand(2, 23, generator=torch.Generator().manual_seed(1)) < 0.8
    at_once = pair_cosines(rows, labels, valid=valid, chunk_size=10)
    monkeypatch.setattr(geometry, "_WORKSPACE", 1)  # one anchor of each chunk at a time
    for one, other in zip(at_once, pair_cosines(rows, labels, valid=valid, chunk_size=10), strict=True):
        torch.testing.assert_close(one, other)
