# SPDX-License-Identifier: Apache-2.0
"""The bench that drives many releases: what it calls equal, which tree it takes, and how its table speaks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from simreg_megatron.adagc import AdaGC
from tests.versions import compare, expected, loops, measure, releases, table, tiny
from tests.versions.compare import Outcome, RunError
from tests.versions.driver import MODES, RUNS
from tests.versions.measure import Cell

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
    every = dict.fromkeys((*measure.COLUMNS, *loops.COLUMNS), Cell(None, why))
    cells = every | {"patch": Cell(False, "it is not")}
    row, of_python = table.Row("0.12.3", cells), table.Row("0.12.3, Python", dict.fromkeys(measure.COLUMNS, Cell(True)))
    shown = table.markdown([row, of_python], command="python -m tests.versions --only 0.12", minutes=1)
    core, of_loops = (line for line in shown.splitlines() if line.startswith("| 0.12.3 |"))
    assert core.count("- [1]") == len(measure.COLUMNS)
    assert of_loops.count("- [1]") == len(loops.COLUMNS) - 1 and "NO: it is not" in of_loops
    assert f"1. {why}" in shown and "--only 0.12" in shown and shown.count("| 0.12.3, Python |") == 1
    assert not row.holds and table.Row("0.12.3", every).holds
    assert all(f"**{name}**" in shown for name in (*measure.SETTINGS, *loops.COLUMNS)), "each column is explained"


def test_settings_are_compared_with_the_run_that_they_must_equal() -> None:
    one, other = outcome(), outcome()
    for variant in ("plain", "defaults"):
        run = f"{MODES[0]} {variant}"
        one.losses[run] = other.losses[run] = one.losses[NAMES[0]]
        one.grads[run], other.grads[run] = ({"weight": torch.full((2,), 1.0)} for _ in range(2))
    other.grads[f"{MODES[0]} defaults"]["weight"] *= 1.001
    assert compare.settings_apart(one, "plain", other, "plain").equals
    assert compare.settings_apart(one, "plain", other, "defaults").grad == pytest.approx(1e-3, rel=1e-3)
    other.grads[f"{MODES[0]} defaults"]["simreg_similarity.query"] = torch.ones(1)
    with pytest.raises(RunError, match=r"simreg_similarity\.query"):
        compare.settings_apart(one, "plain", other, "defaults")


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


def write_run(folder: Path, count: int = 2, steps: int = 1, said: str = "", **changed: object) -> None:
    """A run of `count` ranks: each has its part of the hidden states, and of the parameter `cut`."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(count):
        given = micro_batch([1, 1, 1, 1])
        record = {
            "losses": [6.0] * steps, "norms": [5.0] * steps, "params": f"{rank}",
            "states": [[{**given, "hidden": given["hidden"].chunk(count)[rank]}]] * steps,
            "clipped": [{"cut": (3.0 + rank, 0.3 + rank / 10), "whole": (2.0, 0.2)}] * steps,
            "shards": {"cut": (0, rank, count), "whole": (-1, 0, 1)},
        }  # fmt: skip
        torch.save(record | changed, folder / f"rank{rank}.pt")
    (folder / "log").write_text(said)


def test_a_run_is_joined_from_its_ranks(tmp_path: Path) -> None:
    write_run(tmp_path / "on", said="iteration 1/1 | simreg loss: 1.403652E+00 | lm loss: 6.0\n")
    found = loops.read(tmp_path / "on", 2)
    assert torch.equal(found["states"][0][0]["hidden"], micro_batch([1])["hidden"])
    assert found["clipped"][0] == {"cut": pytest.approx((5.0, 0.5)), "whole": (2.0, 0.2)}
    assert found["params"] == ["0", "1"] and found["simreg"] == [1.403652]
    (tmp_path / "on" / "log").write_text("ValueError: the cause\n")
    with pytest.raises(RunError, match="on: ValueError: the cause"):
        loops.read(tmp_path / "on", 3)


LOOP_LAYOUTS = {"one process": 1, "TP 2 + SP": 2}


def loop(folder: Path) -> loops.Loop:
    return loops.Loop("0.0 tree", folder, folder / "pretrain_gpt.py", [], folder)


@pytest.mark.parametrize("different", ["losses", "norms", "clipped", "params", ""])
def test_a_resumed_run_must_be_the_same_in_everything(different: str, tmp_path: Path) -> None:
    whole = {"losses": [6.0, 5.0, 4.0, 3.0], "norms": [1.0] * 4, "clipped": [{"whole": (1.0, 0.5)}] * 4, "params": "p"}
    rest: dict[str, object] = {name: value if name == "params" else value[2:] for name, value in whole.items()}
    others = {"losses": [4.0, 3.1], "norms": [1.0, 1.1], "clipped": [{"whole": (1.0, 0.6)}] * 2, "params": "q"}
    changed = {name: value for name, value in others.items() if name == different}
    for layout in LOOP_LAYOUTS:
        write_run(tmp_path / f"{layout} saving", steps=4, **whole)
        write_run(tmp_path / f"{layout} resumed", steps=2, **rest | changed)
    if different:
        with pytest.raises(RunError, match=f"one process: the resumed run has other {different}"):
            loops.resume(loop(tmp_path))
    else:
        assert loops.resume(loop(tmp_path)) == ""


def write_loop(folder: Path, factor: float = 1.0, **of_zero: object) -> loops.Loop:
    """Three steps without the plugin, at lambda 0 and with SimReg, whose last value in the log is wrong by `factor`."""
    value = expected.simreg_of([micro_batch([1, 1, 1, 1])], temperature=loops.TEMPERATURE, chunk_size=24)
    lines = [f"simreg loss: {value * (factor if step == 2 else 1):.6E}\n" for step in range(3)]
    for layout, count in LOOP_LAYOUTS.items():
        for variant in ("absent", "zero", "on"):
            changed = of_zero if variant == "zero" else {"norms": [9.0] * 3} if variant == "on" else {}
            write_run(folder / f"{layout} {variant}", count, 3, "".join(lines), **changed)
    return loop(folder)


def test_a_wrong_value_in_the_log_is_told(tmp_path: Path) -> None:
    assert loops.value_apart(write_loop(tmp_path)) < 1e-6
    with pytest.raises(RunError, match="SimReg's value is 1e-03 off"):
        loops.value_apart(write_loop(tmp_path, factor=1.001))


@pytest.mark.parametrize("changed", [{"params": "q"}, {"losses": [6.0, 6.0, 6.0000005]}, {"norms": [5.0, 5.0, 4.9]}])
def test_lambda_0_in_a_loop_is_compared_bit_for_bit(changed: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(RunError, match="one process: lambda 0 differs"):
        loops.value_apart(write_loop(tmp_path, **changed))


def test_clipping_that_misses_the_formula_is_told(tmp_path: Path) -> None:
    norms = [{"cut": 1.0, "whole": 2.0}, {"cut": 3.0, "whole": 4.0}]
    right = expected.adagc_of(norms, lambda_rel=loops.LAMBDA_REL, beta=loops.BETA, warmup=loops.WARMUP)
    for factor in (1.0, 1.001):
        steps = [
            {name: (norm, norm * right[number][name] * (factor if number else 1)) for name, norm in step.items()}
            for number, step in enumerate(norms)
        ]
        for layout in LOOP_LAYOUTS:
            write_run(tmp_path / f"{layout} saving", 2, 2, clipped=steps, shards=dict.fromkeys(norms[0], (-1, 0, 1)))
        if factor == 1.0:
            assert float(loops.adagc(loop(tmp_path))) < 1e-12
        else:
            with pytest.raises(RunError, match="behind AdaGC is 1e-03 off"):
                loops.adagc(loop(tmp_path))
