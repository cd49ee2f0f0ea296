# SPDX-License-Identifier: Apache-2.0
"""The bench that drives many releases: what it calls equal, which tree it takes, and how its table speaks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.versions import compare, releases, table, tiny
from tests.versions.compare import Outcome, RunError
from tests.versions.driver import MODES, VARIANTS
from tests.versions.measure import Cell

NAMES = [f"{mode} {variant}" for mode in MODES for variant in VARIANTS]


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


def test_simreg_that_changes_nothing_has_no_share() -> None:
    assert compare.share(outcome()) == 0
    every_mode = outcome()
    for mode in MODES:
        every_mode.grads[f"{mode} on"]["weight"] *= 2
    assert compare.share(every_mode) == pytest.approx(0.5)


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


def test_the_rank_that_failed_first_is_heard(tmp_path: Path) -> None:
    torch.save({"error": "RuntimeError: Connection reset by peer"}, tmp_path / "rank0.pt")
    torch.save({"error": "AssertionError: the cause"}, tmp_path / "rank1.pt")
    with pytest.raises(RunError, match="the cause"):
        compare.read(tmp_path, 2)


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


def test_no_cell_is_empty_and_long_reasons_become_notes() -> None:
    why = "a reason that is much too long for a narrow cell of a table"
    cells = {name: Cell(None, why) for name in table.COLUMNS} | {"patch": Cell(False, "it is not")}
    row = table.Row("0.12.3", cells)
    shown = table.markdown([row], argv=["--only", "0.12"], minutes=1)
    line = next(line for line in shown.splitlines() if line.startswith("| 0.12.3 "))
    assert line.count("- [1]") == len(table.COLUMNS) - 1 and "NO: it is not" in line
    assert f"1. {why}" in shown and "--only 0.12" in shown
    assert not row.holds and table.Row("0.12.3", cells | {"patch": Cell(None, why)}).holds
