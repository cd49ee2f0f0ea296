# SPDX-License-Identifier: Apache-2.0
"""What would make a comparison unfair is refused while it is still a plan, and settings come from whole searches."""

from __future__ import annotations

from pathlib import Path

import pytest

from simreg_megatron.reproduce.dataset import Dataset
from simreg_megatron.reproduce.errors import ReproduceError
from simreg_megatron.reproduce.plan import METRICS, Plan
from simreg_megatron.reproduce.plan_file import plan_of
from simreg_megatron.reproduce.runs import Entry, entries_of
from simreg_megatron.reproduce.store import DONE, Store
from simreg_megatron.reproduce.tuned import (
    borrowed,
    ended_trials,
    ranked,
    refuse_unfit,
    searched_sizes,
    tuned_in,
    untuned,
)


def a_plan(claim: dict | None = None, **changes: object) -> Plan:
    arms = {"plain": {}, "simreg": {"flags": {"simreg-lambda": 1}}, "short": {"length": 0.7}}
    claims = [] if claim is None else [{"says": "x", "arm": "simreg", "than": "plain", **claim}]
    return plan_of({"name": "mine", "question": "?", "arms": arms, "claims": claims, **changes}, where="mine.yaml")


@pytest.mark.parametrize(
    "trials",
    [
        {"lr": [1e-3, 1e-3, 1e-3]},
        {"lr": [1e-3, "1e-3"]},  # without a dot it is a word in YAML
        [{"lr": 1e-3, "weight-decay": 0.1}, {"weight-decay": 0.1, "lr": 1e-3}],
        [{"lr": 1e-3}, {"weight-decay": 0.3, "lr": 1e-3}],  # the arm's own weight decay
    ],
)
def test_a_setting_that_is_tried_twice_counts_once(trials: object) -> None:
    arm = {"flags": {"weight-decay": 0.3}, "trials": trials}
    with pytest.raises(ReproduceError, match=r"a tries the same setting twice at size 64"):
        a_plan(arms={"a": arm})
    with pytest.raises(ReproduceError, match=r"a tries the same setting twice at size 96"):
        a_plan(sizes=[96], arms={"a": {**arm, "trials": [], "trials_at": {96: trials}}})


def test_a_search_has_no_claims() -> None:
    arms = {name: {"trials": {"lr": [1e-3, 2e-3]}} for name in ("plain", "simreg")}
    with pytest.raises(ReproduceError, match="is a search with claims: trials are not seeds"):
        a_plan({}, arms=arms)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens_per_parameter": -5}, "tokens_per_parameter are numbers above 0, at most 1,000,000"),
        ({"tokens_per_parameter": [20, 0]}, "tokens_per_parameter are numbers above 0"),
        ({"tokens_per_parameter": 1e308}, "tokens_per_parameter are numbers above 0"),
        ({"tokens_per_parameter": []}, "must not be empty"),
        ({"tokens_per_parameter": [20, 20.0]}, "tokens_per_parameter has a value twice"),
        ({"sizes": [64, 64]}, "sizes has a value twice"),
        ({"sizes": [1 << 20_000]}, "a size is a width \\(at most 65536\\)"),
        ({"seeds": 1 << 20_000}, "asks for a number of 2000[0-9] bits runs"),
        ({"steps": {"tiny": -5}}, "steps are above 0"),
        ({"family": "gpt"}, "the family is llama or mixtral, not 'gpt'"),
        ({"name": "noise-curves"}, "without -curves at its end"),
        ({"arms": {"a": {"name": "b"}}}, "an arm's name is what stands before it \\('a'\\): leave out its key name"),
        ({"arms": {"": {}}}, "an arm's name is of letters, digits"),
        ({"arms": {"../../etc": {}}}, "an arm's name is of letters, digits"),
        ({"arms": {"a": {"flags": {"lr": "abc"}}}}, "lr is a number above 0, not 'abc'"),
        ({"arms": {"a": {"flags": {"lr": None}}}}, "lr is a number above 0, not None"),
        ({"arms": {"a": {"flags": {"lr": -0.1}}}}, "lr is a number above 0"),
        ({"arms": {"a": {"flags": {"decoupled-lr": "x"}}}}, "decoupled-lr is a number above 0, not 'x'"),
        ({"arms": {"a": {"flags": {"weight-decay": float("nan")}}}}, "one word or number"),
        ({"arms": {"a": {"flags": {"adagc": True}}}}, "a flag that stands alone nothing"),
        ({"arms": {"a": {"flags": {"simreg-layers": "1 --train-iters 5"}}}}, "one word or number"),
        ({"arms": {"a": {"trials_at": [64]}}}, "trials_at of a is a mapping, each size with its trials"),
        ({"arms": {"a": {"trials": {"lr": 1e-3}}}}, "trials of a: give each flag a list of values"),
        ({"arms": {"a": {"trials": {"lr": [1e-3] * 101, "seed": [1] * 100}}}}, "make more than 10,000 combinations"),
        ({"arms": {"a": {"length": "half"}}}, "a needs a name and a tuned_as that are words, and a length that is a"),
        ({"arms": {"a": {"tuned_as": 5}}}, "a needs a name and a tuned_as that are words"),
        ({"tuned_in": "tuning", "arms": {"a": {"trials": {"lr": [1e-3]}}}}, "nothing tunes it, so leave out tuned_in"),
    ],
)
def test_what_nobody_can_mean_is_refused(changes: dict, words: str) -> None:
    with pytest.raises(ReproduceError, match=words):
        a_plan(**changes)


def test_two_claims_of_the_same_are_one() -> None:
    claim = {"says": "x", "arm": "simreg", "than": "plain"}
    with pytest.raises(ReproduceError, match="two claims compare the same"):
        a_plan(claims=[claim, {**claim, "says": "y"}])
    assert len(a_plan(claims=[claim, {**claim, "metric": "bits_per_byte"}]).claims) == 2


@pytest.mark.parametrize("rate", [1e-3, "1e-3", "0.001"])
def test_an_arm_is_not_compared_with_its_like(rate: object) -> None:
    with pytest.raises(ReproduceError, match="compares b with a, which are the same runs: set them apart"):
        a_plan({"arm": "b", "than": "a"}, arms={"a": {"flags": {"lr": 1e-3}}, "b": {"flags": {"lr": rate}}})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"arms": {"a": {"tuned_as": "nobody"}}},
            "mine: a is tuned_as nobody, and the arms of mine are plain",
        ),
        ({"tuned_in": "other"}, "mine is tuned_in other, and that is no search: its arms have no trials"),
    ],
)
def test_what_tunes_a_plan_is_a_search_with_its_arms(changes: dict, words: str) -> None:
    own = a_plan(**{"tuned_in": "search", "arms": {"a": {"tuned_as": "plain"}}, **changes})
    with pytest.raises(ReproduceError, match=words):
        refuse_unfit(own, a_plan(name="other") if own.tuned_in == "other" else search())


@pytest.mark.parametrize("loss", [None, float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_never_the_best(loss: float | None) -> None:
    assert ranked(loss) == float("inf") and ranked(4.5) == 4.5


ALIKE = (
    "train-iters", "global-batch-size", "seq-length", "hidden-size", "num-layers", "ffn-hidden-size", "eval-interval",
    "num-attention-heads", "eval-iters", "lr-decay-iters", "lr-warmup-iters", "model", "data", "valid-data",
    "tokenizer", "output", "seed", "min-lr",
)  # fmt: skip


@pytest.mark.parametrize("name", ALIKE)
def test_what_all_arms_have_alike_no_arm_may_set(name: str) -> None:
    words = f"may not set {name}, which is decided for all arms alike"
    with pytest.raises(ReproduceError, match=f"flags of a {words}"):
        a_plan(arms={"a": {"flags": {name: 1}}})
    with pytest.raises(ReproduceError, match=f"trials of a {words}"):
        a_plan(arms={"a": {"trials": {name: [1, 2]}}})
    with pytest.raises(ReproduceError, match=f"preset of a {words}"):
        a_plan(arms={"a": {"preset": {name: 1}}})


@pytest.mark.parametrize("flags", [{"train-iters=5": None}, {"--train-iters": 5}, {"plain": "--train-iters=5"}])
def test_no_other_spelling_smuggles_a_flag_in(flags: dict) -> None:
    with pytest.raises(ReproduceError, match="without its dashes, one word or number"):
        a_plan(arms={"a": {"flags": flags}})


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        ({"than": "short"}, "holds by itself, as one arm trains longer"),
        ({"than": "short", "metric": "bits_per_byte"}, "holds by itself"),
        ({"arm": "short", "sign": "higher"}, "holds by itself"),
        ({"arm": "short", "sign": "differs"}, "holds by itself"),
        ({"metric": "valid_loss"}, "is about valid_loss, and what is measured is validation_loss, bits_per_byte"),
        ({"metric": "tokens"}, "is about tokens"),
        ({"than": "simreg"}, "compares simreg with itself"),
        ({"headline": "no"}, "true or false, without quotes"),
        ({"headline": True, "metric": "simreg_loss"}, "is a headline, and those are about validation_loss or bits_per"),
        ({"times": 1.02}, "compares validation_loss with a multiple: times is for seconds_per_step alone"),
    ],
)
def test_a_claim_that_shows_nothing_is_refused(claim: dict, words: str) -> None:
    with pytest.raises(ReproduceError, match=words):
        a_plan(claim)


@pytest.mark.parametrize(
    "claim",
    [
        {"arm": "short"},
        {"than": "short", "sign": "higher"},
        {"than": "short", "metric": "simreg_loss"},
        {"headline": True},
        *({"metric": metric} for metric in METRICS),
    ],
)
def test_other_claims_stand(claim: dict) -> None:
    assert a_plan(claim).claims[0].says == "x"


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return Dataset(tmp_path, digest="0" * 64, bytes_per_token=4.0, validation_tokens=20_481)


def search() -> Plan:
    trials = {"trials": {"lr": [2e-3, 4e-3]}}
    arms = {"plain": {"flags": {"simreg-objective": "none"}, **trials}, "simreg": trials}
    return a_plan(sizes=[64, 96], seeds=1, arms=arms)


def ended(folder: Path, entries: list[Entry]) -> Store:
    """At width 64 the first trial is the best, at 96 the second."""
    kept = Store(folder)
    for entry in entries:
        loss = 4 + abs(entry.trial - {64: 1, 96: 2}[int(entry.size)])
        kept.run_folder(entry.run).mkdir(parents=True)
        kept.keep(entry.run, {"status": DONE, "validation_loss": loss, "version": "0", "commit": "c", "curves": {}})
    return kept


def test_all_arms_take_their_settings_from_the_same_size(tmp_path: Path, dataset: Dataset) -> None:
    entries = entries_of(search(), dataset, untuned)
    missing = next(entry for entry in entries if (entry.arm, entry.size, entry.trial) == ("plain", 96, 2))
    for name, runs, rate in (
        ("whole", entries, "0.004"),
        ("part", [entry for entry in entries if entry != missing], "0.002"),
    ):
        best = tuned_in(search(), entries, ended(tmp_path / name, runs))
        assert [best(arm, 96)["lr"] for arm in ("plain", "simreg")] == [rate, rate], name


def test_a_size_without_a_search_of_its_own_is_told(tmp_path: Path, dataset: Dataset) -> None:
    entries = entries_of(search(), dataset, untuned)
    kept = ended(tmp_path / "out", [entry for entry in entries if entry.size == 64])
    searched = searched_sizes(search(), ended_trials(entries, kept))
    assert searched == [64]
    assert borrowed([64, 96, 128], searched) == "settings of width 64 used at 96; settings of width 64 used at 128"
    assert borrowed(["tiny", "350m"], [64, 96]) == "settings of width 96 used at tiny", "350m has the paper's"
    assert borrowed([64], searched) == "" == borrowed([96], [])


def test_a_search_that_tries_nothing_has_no_settings(dataset: Dataset) -> None:
    assert searched_sizes(a_plan(), {("plain", "64"): 9, ("simreg", "64"): 9, ("short", "64"): 9}) == []
