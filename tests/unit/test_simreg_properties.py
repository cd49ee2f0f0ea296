# SPDX-License-Identifier: Apache-2.0
"""Properties of every input: invariances, bounds, and that masked tokens do not exist."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from simreg_megatron.losses import simreg_loss
from tests.helpers.fixtures import random_tokens

pytestmark = pytest.mark.usefixtures("every_impl")

TEMPERATURES = (1.0, 0.1, 0.01)

quick = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # it is the same for all examples
    deadline=None,
    derandomize=True,
    max_examples=50,
    database=None,
)
seeds = st.integers(0, 2**31 - 1)


@st.composite
def tokens(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """One or two sequences of embeddings, labels and a mask; clustered, so that losses are not tiny."""
    shape = draw(st.integers(1, 2)), draw(st.integers(1, 14)), draw(st.integers(2, 6))
    seed = draw(seeds)
    rows, labels = random_tokens(shape, num_labels=draw(st.integers(1, 5)), seed=seed)
    valid = torch.rand(shape[:2], generator=torch.Generator().manual_seed(seed)) < draw(st.sampled_from((0.6, 1.0)))
    return rows + draw(st.sampled_from((0.0, 2.0))), labels, valid


def per_token(rows: Tensor, labels: Tensor, valid: Tensor, temperature: float, chunk_size: int = 0) -> Tensor:
    return simreg_loss(rows, labels, valid=valid, temperature=temperature, chunk_size=chunk_size, reduction="none")


def assert_same(terms: Tensor, expected: Tensor, temperature: float) -> None:
    # A cosine is good to 1e-15, hence a logit to 1e-15 / temperature: the relative error of the term.
    torch.testing.assert_close(terms, expected, rtol=1e-13 / temperature, atol=1e-300)


@pytest.mark.parametrize("change", ["scale of each row", "rotation", "names of labels", "order inside chunks"])
@quick
@given(tokens(), st.sampled_from(TEMPERATURES), st.sampled_from((0, 2, 5)), seeds)
def test_what_changes_nothing(
    change: str, batch: tuple[Tensor, Tensor, Tensor], temperature: float, chunk_size: int, seed: int
) -> None:
    rows, labels, valid = batch
    expected = per_token(rows, labels, valid, temperature, chunk_size)
    generator, order = torch.Generator().manual_seed(seed), torch.arange(labels.shape[1])
    if change == "scale of each row":
        rows = rows * (10.0 * torch.randn(*rows.shape[:2], 1, generator=generator, dtype=torch.float64)).exp()
    if change == "rotation":
        square = torch.randn(rows.shape[2], rows.shape[2], generator=generator, dtype=torch.float64)
        rows = rows @ torch.linalg.qr(square).Q
    if change == "names of labels":
        labels = torch.randperm(5, generator=generator)[labels] * 7919
    if change == "order inside chunks":
        chunks = order.split(chunk_size or len(order))
        order = torch.cat([chunk[torch.randperm(len(chunk), generator=generator)] for chunk in chunks])
    found = per_token(rows[:, order], labels[:, order], valid[:, order], temperature, chunk_size)
    assert_same(found, expected[:, order], temperature)
    assert change != "names of labels" or torch.equal(found, expected)


def test_the_order_across_chunks_does_matter() -> None:
    rows, labels = random_tokens((1, 12, 3), num_labels=4, seed=5)
    valid = torch.ones_like(labels, dtype=torch.bool)
    order = torch.arange(12).roll(3)
    moved = per_token(rows[:, order], labels[:, order], valid, 0.1, 4)
    assert not torch.allclose(moved, per_token(rows, labels, valid, 0.1, 4)[:, order], rtol=0.1)


@quick
@given(tokens(), st.sampled_from(TEMPERATURES))
def test_bounds(batch: tuple[Tensor, Tensor, Tensor], temperature: float) -> None:
    """log N - log P - 2 / tau <= L_i <= log N, hence 0 <= R_i <= log(1 + N_i)."""
    rows, labels, valid = batch
    terms = per_token(rows, labels, valid, temperature)
    both = valid.unsqueeze(1) & valid.unsqueeze(2)
    equal = labels.unsqueeze(1) == labels.unsqueeze(2)
    num_negative = (both & ~equal).sum(2).double()
    num_positive = (both & equal).sum(2).double()
    lowest = num_negative.log() - num_positive.clamp(min=1).log() - 2 / temperature
    assert (terms >= 0).all()
    assert (terms <= num_negative.log1p() * (1 + 1e-12)).all()
    assert (terms >= torch.nn.functional.softplus(lowest) * (1 - 1e-12)).all()
    assert torch.equal(terms > 0, num_negative > 0), "0 only without negatives"


@quick
@given(
    tokens(),
    st.sampled_from((0, 3)),
    st.sampled_from(("token", "uniform", "pos-neg-ratio", "neg-pos-ratio", "count-corrected")),
    st.sampled_from((0.0, 1e300, math.nan, math.inf)),
    st.integers(-100, 9),
)
def test_masked_tokens_do_not_exist(
    batch: tuple[Tensor, Tensor, Tensor], chunk_size: int, chunk_weight: str, value: float, label: int
) -> None:
    rows, labels, valid = batch
    other_rows = torch.where(valid.unsqueeze(-1), rows, value)
    other_labels = torch.where(valid, labels, label)
    results = []
    for embeddings, targets in ((rows, labels), (other_rows, other_labels)):
        embeddings = embeddings.clone().requires_grad_()
        loss = simreg_loss(
            embeddings, targets, valid=valid, temperature=0.1, chunk_size=chunk_size, chunk_weight=chunk_weight
        )
        (grad,) = torch.autograd.grad(loss, embeddings)
        assert (grad[~valid] == 0).all()
        assert torch.isfinite(grad).all()
        results.append((loss, grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@quick
@given(tokens())
def test_leaving_masked_tokens_out_of_the_input_gives_the_same(batch: tuple[Tensor, Tensor, Tensor]) -> None:
    rows, labels, valid = (part[0] for part in batch)
    terms = simreg_loss(rows, labels, valid=valid, temperature=0.1, reduction="none")
    shorter = simreg_loss(rows[valid], labels[valid], temperature=0.1, reduction="none")
    assert_same(terms[valid], shorter, 0.1)
    assert (terms[~valid] == 0).all()
