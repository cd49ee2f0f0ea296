# SPDX-License-Identifier: Apache-2.0
"""The runs behind benchmarks.steps and benchmarks.step_pairs: arguments, attention, alternating and profiled steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks import launched, step_profile, steps, timing, train
from launch.launcher import make_parser
from launch.plan import Machine, build_plan


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


@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize(("kind", "width"), [(steps.PLAIN, 2432), ("plain Megatron, FFN of the preset", 2371)])
def test_steps_of_350m_have_an_aligned_ffn_and_one_kind_the_presets(engine: bool, kind: str, width: int) -> None:
    own = ("--data", "text", "--tokenizer", "t.model", *steps.KINDS[kind])
    words = ("--model", "350m", "--train-iters", "60", *launched.of_model("350m"), *own)
    given, more = make_parser("llama").parse_known_args(words)
    machine = Machine(gpus=1, world_size=1, transformer_engine=engine)
    made = build_plan("llama", given, more, machine, environ={}, stamp="now")
    flags = [word for flag in made.flags for word in flag]
    assert flags[flags.index("--ffn-hidden-size") + 1] == str(width)
    assert "--no-create-attention-mask-in-dataloader" in flags
    assert kind not in steps._chosen("tiny", "FFN") or kind == steps.PLAIN


def test_idle_time_is_that_before_a_kernel() -> None:
    def event(key: str, start: float, end: float, *, is_span: bool = False) -> SimpleNamespace:
        return SimpleNamespace(key=key, time_range=SimpleNamespace(start=start, end=end), is_user_annotation=is_span)

    events = [event("b", 3000, 9000), event("span", 0, 9e9, is_span=True), event("a", 0, 1000), event("c", 5000, 6000)]
    found = step_profile._idle_before([*events, event("b", 9500, 9600)])
    assert found == {"b": 2.5, "c": 0.0}


def test_the_overhead_is_taken_within_turns() -> None:
    """A machine that is twice as slow in its second turn says nothing of the runs."""
    found = timing.overhead([[1.0, 1.0], [2.0, 2.0]], [[1.1, 1.1], [2.2, 2.2]])
    assert found.percent == pytest.approx(10.0) and (found.low, found.high) == pytest.approx((10.0, 10.0))
    with pytest.raises(ValueError, match="every turn"):
        timing.overhead([[1.0]], [[1.0], [2.0]])
