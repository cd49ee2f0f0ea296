# SPDX-License-Identifier: Apache-2.0
"""SimReg's terms and their gradient in float64, written down as the definition has them; nothing of the package.

Shapes: b sequences, n tokens, D features; p anchors of each sequence.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Exact(NamedTuple):
    """Terms of the anchors, and what they do to every state."""

    terms: Tensor  # [b, p]
    pull: Tensor  # [b, n, D]: |e_i| times the gradient of sum_a c_a L_a in e_i, with the anchors' weights c
    reach: Tensor  # [b, n]: sum of |c_a dL_a / d cos| over the pairs of a state; the gradient has no larger length


def simreg(rows: Tensor, labels: Tensor, usable: Tensor, anchors: Tensor, weights: Tensor, tau: float) -> Exact:
    """Compute the terms of the anchors [b, p], each with its weight [b, p] in the loss.

    s_ij = cos(e_i, e_j) / tau; L_i = log(1 + sum_N exp s / sum_P exp s), where P has i itself.
    """
    units, weights = _units(rows.double()), weights.double()
    own_units = units.take_along_dim(anchors.unsqueeze(-1), dim=1)
    own_usable, own_labels = usable.gather(1, anchors), labels.gather(1, anchors)
    cosines = own_units @ units.mT  # [b, p, n]
    meets, same = own_usable.unsqueeze(-1) & usable.unsqueeze(1), own_labels.unsqueeze(-1) == labels.unsqueeze(1)
    positive, negative = meets & same, meets & ~same
    logits = cosines / tau
    above, below = (_log_sum(logits, members) for members in (negative, positive))
    has_both = negative.any(dim=-1) & own_usable
    ratio = torch.where(has_both, above - below, -math.inf)
    terms = torch.nn.functional.softplus(ratio, threshold=700)
    falls = (weights * torch.sigmoid(ratio) / tau).unsqueeze(-1)
    slopes = falls * (  # c_a dL_a / d cos_aj
        torch.where(negative, (logits - above.unsqueeze(-1)).exp(), 0.0)
        - torch.where(positive, (logits - below.unsqueeze(-1)).exp(), 0.0)
    )
    slopes = torch.where(has_both.unsqueeze(-1), slopes, 0.0)
    own = slopes @ units - (slopes * cosines).sum(dim=-1, keepdim=True) * own_units
    pull = slopes.mT @ own_units - (slopes * cosines).sum(dim=1).unsqueeze(-1) * units
    pull.scatter_add_(1, anchors.unsqueeze(-1).expand_as(own), own)
    reach = slopes.abs().sum(dim=1).scatter_add(1, anchors, slopes.abs().sum(dim=-1))
    return Exact(terms, pull, reach)


def _units(rows: Tensor) -> Tensor:
    largest = rows.abs().amax(dim=-1, keepdim=True).clamp(min=1e-300)
    rows = rows / largest
    return rows / rows.norm(dim=-1, keepdim=True).clamp(min=1e-300)


def _log_sum(logits: Tensor, members: Tensor) -> Tensor:
    return logits.masked_fill(~members, -math.inf).logsumexp(dim=-1)
