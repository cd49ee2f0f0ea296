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
