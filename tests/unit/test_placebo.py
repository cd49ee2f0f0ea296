# SPDX-License-Identifier: Apache-2.0
"""The control: the same labels, equally often in each chunk, on other tokens."""

import pytest
import torch

from simreg_megatron import SimRegConfig
from simreg_megatron.contrib.placebo import permuted_labels
from simreg_megatron.losses import simreg_loss
from simreg_megatron.plugin.term import Regularizer
from tests.unit.test_regularizer import BATCH, LENGTH, One, add, measuring, micro_batch

CHUNK = 5


def moved(labels: torch.Tensor, usable: torch.Tensor, *, chunk_size: int = CHUNK, **changes: int) -> torch.Tensor:
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
def test_labels_stay_in_their_chunk_and_none_on_its_token(chunk_size: int) -> None:
    labels, usable = distinct()
    found = moved(labels, usable, chunk_size=chunk_size)
    for b in range(BATCH):
        for first in range(0, LENGTH, chunk_size or LENGTH):
            own = slice(first, first + (chunk_size or LENGTH))
            takes_part = usable[b, own]
            before, after = labels[b, own][takes_part], found[b, own][takes_part]
            assert sorted(before.tolist()) == sorted(after.tolist())
            assert len(before) < 2 or not (before == after).any()
            assert torch.equal(labels[b, own][~takes_part], found[b, own][~takes_part])


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
    regularizer.set_iteration(7)
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
    settings = {"lambda_": 2.0, "temperature": 0.1, "chunk_size": 6}
    add(Regularizer(SimRegConfig(objective="placebo", objective_options="labels=none", **settings)),
        hidden, labels, mask, loss).sum().backward()  # fmt: skip
    found, hidden.grad = hidden.grad.clone(), None
    alone = torch.arange(labels.shape[1]).expand_as(labels)
    add(Regularizer(SimRegConfig(**settings)), hidden, alone, mask, loss).sum().backward()
    torch.testing.assert_close(found, hidden.grad, rtol=1e-12, atol=0)
    own = hidden.grad.clone()
    hidden.grad = None
    add(Regularizer(SimRegConfig(**settings)), hidden, labels, mask, loss).sum().backward()
    assert not torch.allclose(own, hidden.grad, rtol=0.1), "labels matter in this sample"
