# SPDX-License-Identifier: Apache-2.0
"""The bench that drives many releases: what it calls equal, which tree it takes, and how its table speaks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from simreg_megatron.adagc import AdaGC
from tests.versions import compare, expected, releases, tiny
from tests.versions.compare import Outcome, RunError
from tests.versions.driver import MODES, RUNS

NAMES = RUNS


def outcome(**changed: float) -> Outcome:
    """Two micro-batches, one parameter; `changed` scales the gradient of some variants, in the last mode alone."""
    factors = {f"{MODES[-1]} {variant}": factor for variant, factor in changed.items()}
    weight = torch.arange(1.0, 7.0).view(2, 3)
    return Outcome(
        {name: torch.tensor([6.0, 5.5], dtype=torch.float64) for name in NAMES},
        {name: {"weight": weight * factors.get(name, 1.0)} for name in NAMES},
    )


def test_equal_is_equal_up_to_rounding_and_no_further() -> None:
    assert compare.difference(outcome(), outcome()) == compare.Difference(0.0, 0.0)
    assert compare.difference(outcome(), outcome(on=1 + 1e-6)).equals
    assert not compare.difference(outcome(), outcome(on=1 + 1e-4)).equals
    assert not compare.difference(outcome(), outcome(on=float("nan"))).equals


def test_lambda_0_is_compared_bit_for_bit() -> None:
    assert compare.same_bits(outcome(), "absent", "zero")
    assert not compare.same_bits(outcome(zero=1 + 2e-7), "absent", "zero")


def write_ranks(folder: Path, grads: list[torch.Tensor], shards: list[tiny.Shard]) -> None:
    for rank, (grad, shard) in enumerate(zip(grads, shards, strict=True)):
        runs = {name: {"losses": [6.0] if rank else [], "grads": {"weight": grad}} for name in NAMES}
        torch.save({"shards": {"weight": shard}, **runs}, folder / f"rank{rank}.pt")


def test_ranks_are_joined(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(4, 3)
    write_ranks(tmp_path, list(whole.chunk(2)), [(0, 0, 2), (0, 1, 2)])
    read = compare.read(tmp_path, 2)
    assert all(torch.equal(grads["weight"], whole) for grads in read.grads.values())


def test_replicas_that_differ_are_an_error(tmp_path: Path) -> None:
    write_ranks(tmp_path, [torch.ones(2), torch.ones(2) + 1e-7], [(-1, 0, 1)] * 2)
    with pytest.raises(RunError, match="the gradient of weight differs"):
        compare.read(tmp_path, 2)
    with pytest.raises(RunError, match="a rank ended without a word"):
        compare.read(tmp_path, 3)


@pytest.mark.parametrize("name", ["decoder.layers.0.mlp.linear_fc1.weight", "output_layer.weight"])
def test_parts_make_the_whole_again(name: str) -> None:
    whole = torch.arange(24.0).view(8, 3)
    parts = {index: tiny.part(whole, name, (0, index, 2)) for index in range(2)}
    assert torch.equal(tiny.whole(parts, name, (0, 0, 2)), whole)
    assert torch.equal(parts[0], whole[[0, 1, 4, 5]] if "fc1" in name else whole[:4])  # a gated layer has two halves


def make_tree(folder: Path, minor: int) -> Path:
    info = folder / "megatron" / "core" / "package_info.py"
    info.parent.mkdir(parents=True)
    info.write_text(f"MAJOR = 0\nMINOR = {minor}\nPATCH = 1\n")
    (folder / "pretrain_gpt.py").touch()
    return folder


def test_a_tree_is_taken_for_the_line_it_is_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "sources"
    old, new = make_tree(sources / "core_v0.13.1", 13), make_tree(sources / "main", 20)
    assert releases.given_tree("0.13.1", sources) == old and releases.given_tree("main", sources) == new
    assert releases.given_tree("0.14.0", sources) is None and releases.given_tree("0.13.1", None) is None
    make_tree(sources / "core_v0.14.0", 15)
    with pytest.raises(releases.ReleaseError, match=r"core_v0\.14\.0 holds a tree of 0\.15"):
        releases.given_tree("0.14.0", sources)
    named = make_tree(tmp_path / "mine", 16)
    monkeypatch.setenv("MEGATRON_PATH", str(named))
    assert releases.given_tree("0.16.1", None) == named and releases.given_tree("0.17.1", None) is None


# Training loops -------------------------------------------------------------------------------------------------------


def test_the_coefficients_by_formula_are_those_of_adagc() -> None:
    """Of the package's own, whose norms here leave the average in both directions."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.rand(6, 3, generator=generator, dtype=torch.float64) * torch.tensor([0.01, 1.0, 5.0]) + 1e-3
    package = AdaGC(3, lambda_rel=1.04, beta=0.8, warmup_iters=2)
    by_formula = expected.adagc_of(
        [dict(zip("abc", step.tolist(), strict=True)) for step in steps], lambda_rel=1.04, beta=0.8, warmup=2
    )
    wrong = expected.adagc_of(
        [dict(zip("abc", step.tolist(), strict=True)) for step in steps], lambda_rel=1.04, beta=0.7, warmup=2
    )
    found = torch.stack([package.step(step.square()).coefficients for step in steps]).double()
    assert (found[2:] < 0.99).any() and (found[2:] == 1).any()
    as_tensor = [torch.tensor([list(step.values()) for step in of], dtype=torch.float64) for of in (by_formula, wrong)]
    torch.testing.assert_close(as_tensor[0], found, rtol=1e-6, atol=0)
    assert ((as_tensor[1] - found).abs() / found).max() > 1e-3


def micro_batch(mask: list[float]) -> dict[str, torch.Tensor]:
    hidden = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]]).unsqueeze(1)
    return {"hidden": hidden, "labels": torch.tensor([[3, 4, 3, 5]]), "mask": torch.tensor([mask])}


def test_the_value_by_formula_is_a_mean_over_the_tokens_of_a_step() -> None:
    """Chunks of two, each of two labels: a token has itself and one negative. Masked tokens are nobody's."""
    pair = [math.log1p(math.exp((cosine - 1) / 0.5)) for cosine in (0.6, 0.0)]
    both = [micro_batch([1, 1, 1, 1]), micro_batch([1, 1, 1, 0])]
    found = expected.simreg_of(both, temperature=0.5, chunk_size=2)
    assert found == pytest.approx((2 * (2 * pair[0] + 2 * pair[1]) - 2 * pair[1]) / 7)
    assert found != pytest.approx(expected.simreg_of(both[:1] * 2, temperature=0.5, chunk_size=2), rel=1e-3)
