# SPDX-License-Identifier: Apache-2.0
"""The control: the same labels, equally often in each chunk, on other tokens."""

from typing import Any

import pytest
import torch

from simreg_megatron import SimRegConfig
from simreg_megatron.contrib.placebo import permuted_labels
from simreg_megatron.losses import simreg_loss
from simreg_megatron.plugin.term import Regularizer
from tests.unit.test_regularizer import BATCH, LENGTH, One, add, measuring, micro_batch

CHUNK = 5


def moved(labels: torch.Tensor, usable: torch.Tensor, *, chunk_size: int = CHUNK, **changes: Any) -> torch.Tensor:
    given = {"chunk_size": chunk_size, "longest": chunk_size or labels.shape[1], "seed": 0, "iteration": 3}
    return permuted_labels(labels, usable, **given | changes)


def distinct() -> tuple[torch.Tensor, torch.Tensor]:
    """A label for each token, so that it shows where one went; chunks of 5, 5 and 2 tokens."""
    labels = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH)
    usable = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    usable[0, 5:9] = False  # one token alone in its chunk
    usable[1, [0, 3]] = False
    usable[1, 10:] = False  # none
    return labels, usable


@pytest.mark.parametrize("chunk_size", [CHUNK, 0])
@pytest.mark.parametrize("document", [LENGTH, 4], ids=lambda tokens: f"documents of {tokens}")
def test_labels_stay_in_their_chunk_and_document_and_none_on_its_token(chunk_size: int, document: int) -> None:
    (labels, usable), position = distinct(), torch.arange(LENGTH).expand(BATCH, -1)
    permuted = moved(labels, usable, chunk_size=chunk_size, documents=position // document)
    groups = LENGTH * (position // (chunk_size or LENGTH)) + position // document
    for b in range(BATCH):
        for group in groups.unique():
            takes_part = usable[b] & (groups[b] == group)
            before, after = labels[b, takes_part], permuted[b, takes_part]
            assert sorted(before.tolist()) == sorted(after.tolist())
            assert len(before) < 2 or not (before == after).any()
    assert torch.equal(labels[~usable], permuted[~usable])
    assert document < LENGTH or torch.equal(permuted, moved(labels, usable, chunk_size=chunk_size))


def test_each_iteration_and_seed_has_its_own_draw() -> None:
    labels, usable = distinct()
    one = moved(labels, usable)
    assert torch.equal(one, moved(labels, usable))
    assert not torch.equal(one, moved(labels, usable, iteration=4))
    assert not torch.equal(one, moved(labels, usable, seed=1))


def test_it_is_simreg_with_these_labels_and_the_log_says_so() -> None:
    """The loss is the placebo's; the cosines are of the tokens' own labels, as everywhere."""
    hidden, labels, mask, loss = micro_batch()
    settings = {"lambda_": 3, "temperature": 0.1, "chunk_size": CHUNK}
    regularizer = measuring(SimRegConfig(objective="placebo", objective_options="seed=2", **settings))
    regularizer.strength.set_iteration(7)
    result = add(regularizer, hidden, labels, mask, loss)
    assert torch.equal(result, loss)
    result.sum().backward()
    placebo, means = hidden.grad.clone(), regularizer.metrics.reduce(One())

    expected = hidden.detach().clone().requires_grad_()
    others = moved(labels, mask > 0, seed=2, iteration=7)
    options = {"temperature": 0.1, "valid": mask > 0, "chunk_size": CHUNK, "reduction": "none"}
    terms = simreg_loss(expected.transpose(0, 1), others, **options)
    (3 * terms).sum().backward()
    torch.testing.assert_close(placebo, expected.grad, rtol=1e-12, atol=1e-14)
    assert means["placebo loss"].item() == pytest.approx((terms.sum() / mask.sum()).item(), rel=1e-6)

    hidden.grad = None
    simreg = measuring(SimRegConfig(**settings))
    add(simreg, hidden, labels, mask, loss).sum().backward()
    assert not torch.allclose(placebo, hidden.grad, rtol=0.1), "labels matter in this sample"
    own = simreg.metrics.reduce(One())
    assert "simreg loss" not in means
    for name in ("simreg positive cosine", "simreg negative cosine", "simreg isotropy"):
        torch.testing.assert_close(means[name], own[name], rtol=0, atol=0, msg=name)


def test_without_labels_each_token_is_alone() -> None:
    """SimReg on labels that are all different, instead of the tokens' own."""
    hidden, labels, mask, loss = micro_batch()

    def gradient(labels: torch.Tensor, **settings: Any) -> torch.Tensor:
        regularizer = Regularizer(SimRegConfig(lambda_=2.0, temperature=0.1, chunk_size=6, **settings))
        return torch.autograd.grad(add(regularizer, hidden, labels, mask, loss).sum(), hidden)[0]

    alone = gradient(torch.arange(labels.shape[1]).expand_as(labels))
    placebo = gradient(labels, objective="placebo", objective_options="labels=none")
    torch.testing.assert_close(placebo, alone, rtol=1e-12, atol=0)
    assert not torch.allclose(alone, gradient(labels), rtol=0.1), "labels matter in this sample"
