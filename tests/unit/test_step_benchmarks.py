# SPDX-License-Identifier: Apache-2.0
"""The runs behind benchmarks.steps and benchmarks.step_pairs: arguments, attention, alternating and profiled steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks import timing, train


@pytest.mark.parametrize("groups", [4, 2])
def test_attention_by_torchs_kernels_is_causal_attention(groups: int) -> None:
    """[S, B, heads, D] as Megatron passes them, with fewer heads of keys than of queries, too."""
    generator = torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(7, 2, heads, 8, dtype=torch.float64, generator=generator) for heads in (4, groups, groups)
    )
    scale = 0.3
    scores = torch.einsum("sbhd,tbhd->bhst", query, key.repeat_interleave(4 // groups, 2)) * scale
    scores = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf).softmax(-1)
    expected = torch.einsum("bhst,tbhd->sbhd", scores, value.repeat_interleave(4 // groups, 2)).flatten(2)
    found = train.torch_attention(SimpleNamespace(softmax_scale=scale), query, key, value, None, attn_mask_type=1)
    assert found.shape == (7, 2, 32) and torch.allclose(found, expected, atol=1e-12)


def test_the_overhead_is_taken_within_turns() -> None:
    """A machine that is twice as slow in its second turn says nothing of the runs."""
    found = timing.overhead([[1.0, 1.0], [2.0, 2.0]], [[1.1, 1.1], [2.2, 2.2]])
    assert found.percent == pytest.approx(10.0) and (found.low, found.high) == pytest.approx((10.0, 10.0))
    with pytest.raises(ValueError, match="every turn"):
        timing.overhead([[1.0]], [[1.0], [2.0]])
