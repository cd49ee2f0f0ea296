# SPDX-License-Identifier: Apache-2.0
"""A loss that has taken on a term's gradient is a tensor as Megatron's own: a loop may change it in place."""

from __future__ import annotations

import pytest
import torch

from simreg_megatron.parallel.autograd import add_gradient


def test_a_loop_may_change_the_loss_in_place() -> None:
    given_BS = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    term_BS = torch.tensor([[5.0, 7.0]], requires_grad=True)
    mask_BS = torch.tensor([[1.0, 0.0, 0.5]])
    base_BS = given_BS * 1.0
    loss_BS = add_gradient(base_BS, term_BS, 2.0, start=1)
    loss_BS *= mask_BS
    loss_BS.sum().backward()
    assert loss_BS.tolist() == [[1.0, 0.0, 1.5]]
    assert given_BS.grad is not None and torch.equal(given_BS.grad, mask_BS)
    assert term_BS.grad is not None and torch.equal(term_BS.grad, 2.0 * mask_BS[:, 1:])


def test_a_change_in_place_of_what_a_backward_needs_is_found() -> None:
    """As without SimReg: the loss shares the count of changes with the one that Megatron computed."""
    given_BS = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    base_BS = given_BS.exp()  # whose backward needs its own value
    loss_BS = add_gradient(base_BS, torch.zeros(1, 3, requires_grad=True))
    loss_BS *= 2.0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_BS.sum().backward()
