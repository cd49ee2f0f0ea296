# SPDX-License-Identifier: Apache-2.0
"""Plans of experiments: what a file may say, what is refused, and which runs come of it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from simreg_megatron.cli import app
from simreg_megatron.reproduce.dataset import Dataset
from simreg_megatron.reproduce.errors import ReproduceError
from simreg_megatron.reproduce.plan import Plan, as_content
from simreg_megatron.reproduce.plan_file import plan_names, plan_of, read_plan
from simreg_megatron.reproduce.runs import Run, distinct, entries_of, tokens_of, validation_batches
from simreg_megatron.reproduce.shapes import Shape
from simreg_megatron.reproduce.store import Store
from simreg_megatron.reproduce.tuned import first_trial_of, tuned_in, untuned


@pytest.fixture
def dataset(tmp_path) -> Dataset:
    return Dataset(tmp_path, digest="0" * 64, bytes_per_token=4.0, validation_tokens=20_481)


def a_plan(**changes) -> Plan:
    content = {
        "name": "mine",
        "question": "Does it help?",
        "sizes": [64],
        "seeds": 3,
        "arms": {"plain": {"flags": {"simreg-objective": "none"}}, "simreg": {"flags": {"simreg-lambda": 1}}},
    }
    return plan_of({**content, **changes}, where="mine.yaml")


def test_the_experiments_that_the_pages_promise_are_there():
    promised = (
        "convergence saving tuning sweep scaling horizon layers chunks baselines objectives moe runtime similarity "
        "histogram plateau clipping controls labels schedule noise edge fewer shortened lengthened early initialisation"
    )
    assert set(plan_names()) == set(promised.split())
    page = (Path(__file__).resolve().parents[2] / "docs" / "evidence.md").read_text()
    assert [name for name in plan_names() if f"| `{name}` |" not in page] == []


@pytest.mark.parametrize("name", plan_names())
def test_every_plan_of_the_package_can_be_read_and_has_runs(name, dataset):
    plan = read_plan(name)
    assert plan.name == name
    found = entries_of(plan, dataset, lambda arm, size: {"lr": "0.002"})
    assert len({(e.arm, e.size, e.tokens_per_parameter, e.seed, e.trial) for e in found}) == len(found)
    assert {entry.arm for entry in found} == {arm.name for arm in plan.arms}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"question": ""}, "has no question"),
        ({"colour": "red"}, "unknown key colour"),
        ({"arms": ["plain"]}, "arms is a mapping"),
        ({"arms": {"plain": {"flag": {}}}}, "unknown key flag"),
        ({"arms": {"a": {"trials": {"lr": [1e-3, 2e-3]}}, "b": {"trials": {"lr": [1e-3]}}}}, r"a 2, b 1"),
        ({"arms": {"a": {"trials": {"lr": 1e-3}}}}, "a list of values"),
        ({"claims": [{"says": "x", "arm": "simreg", "than": "nobody"}]}, "names nobody"),
        ({"claims": [{"says": "x", "arm": "simreg", "than": "plain", "sign": "better"}]}, "lower, higher, differs"),
        ({"arms": {"a": {"tuned_as": "x"}}}, "no tuned_in"),
        ({"arms": {"a": {"length": 1.5}}}, "a share of the plan's"),
        ({"seeds": 0}, "at least 1"),
        (
            {"sizes": [64, 96], "arms": {"a": {"trials_at": {96: {"lr": [1e-3]}}}, "b": {}}},
            r"unequal numbers of trials at size 96 \(a 1, b 0\)",
        ),
        ({"claims": [{"says": "x", "arm": "simreg", "than": "plain", "times": 0}]}, "a multiple above 0"),
        (
            {"claims": [{"says": "x", "arm": "simreg", "than": "plain", "times": 2, "sign": "differs"}]},
            "lower or higher",
        ),
        ({"sizes": [64, 96], "seeds": {64: 5}}, "not at 96"),
    ],
)
def test_a_plan_that_cannot_be_meant_is_refused_in_one_sentence(changes, words):
    with pytest.raises(ReproduceError, match=words):
        a_plan(**changes)


def test_an_unknown_experiment_names_those_there_are():
    with pytest.raises(ReproduceError, match=r"no experiment savings: choose from .*saving"):
        read_plan("savings")


def test_a_file_that_is_no_yaml_is_named(tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_text("arms: [")
    with pytest.raises(ReproduceError, match=r"broken\.yaml cannot be read as YAML"):
        read_plan(str(path))


def test_runs_come_seed_by_seed_with_the_arms_in_turns(dataset):
    found = entries_of(a_plan(), dataset, untuned)
    assert [(entry.seed, entry.arm) for entry in found] == [(s, a) for s in (1, 2, 3) for a in ("plain", "simreg")]
    assert len(distinct(found)) == 6


def test_sizes_may_have_seeds_of_their_own(dataset):
    found = entries_of(a_plan(sizes=[64, 96], seeds={64: 3, 96: 1}), dataset, untuned)
    assert [sum(entry.size == size for entry in found) for size in (64, 96)] == [6, 2]


@pytest.mark.parametrize("name", plan_names())
def test_a_plan_can_be_kept_and_read_again(name):
    plan = read_plan(name)
    assert plan_of(json.loads(json.dumps(as_content(plan))), where="kept") == plan


def test_a_search_uses_other_seeds_than_the_runs_that_are_judged(dataset):
    arms = {name: {"trials": {"lr": [1e-3, 2e-3]}} for name in ("plain", "simreg")}
    found = entries_of(a_plan(arms=arms, seeds=1), dataset, untuned)
    assert {entry.seed for entry in found} == {101}
    assert [(entry.trial, entry.arm) for entry in found] == [(1, "plain"), (1, "simreg"), (2, "plain"), (2, "simreg")]
    judged = entries_of(a_plan(), dataset, untuned)
    assert not {entry.run.seed for entry in found} & {entry.run.seed for entry in judged}


def test_a_size_may_have_trials_of_its_own(dataset):
    both = {"trials": {"lr": [1e-3, 2e-3]}, "trials_at": {96: {"lr": [4e-3]}}}
    search = a_plan(sizes=[64, 96], seeds=1, arms={"plain": both, "simreg": both})
    found = entries_of(search, dataset, untuned)
    assert [(e.size, e.arm, e.trial, e.run.value("lr")) for e in found] == [
        (64, "plain", 1, "0.001"), (64, "simreg", 1, "0.001"), (64, "plain", 2, "0.002"), (64, "simreg", 2, "0.002"),
        (96, "plain", 1, "0.004"), (96, "simreg", 1, "0.004"),
    ]  # fmt: skip
    assert first_trial_of(search)("simreg", 96) == {"lr": "0.004"}
    assert plan_of(json.loads(json.dumps(as_content(search))), where="kept") == search


def test_a_head_may_learn_at_a_multiple_of_the_arms_rate(dataset):
    arms = {"a": {"flags": {"lr": 2e-3, "decoupled-lr": "4x"}}}
    (entry, *_) = entries_of(a_plan(arms=arms), dataset, untuned)
    flags = ("lr", "min-lr", "decoupled-lr", "decoupled-min-lr")
    assert [float(entry.run.value(name)) for name in flags] == pytest.approx([2e-3, 2e-4, 8e-3, 8e-4])
    with pytest.raises(ReproduceError, match="decoupled-lr 4x is a multiple of the arm's lr, and it has none"):
        entries_of(a_plan(arms={"a": {"flags": {"decoupled-lr": "4x"}}}), dataset, untuned)


def test_experiments_share_the_runs_that_are_alike(dataset):
    one, other = a_plan(), replace(a_plan(seeds=5), name="other")
    shared = set(distinct(entries_of(one, dataset, untuned))) & set(distinct(entries_of(other, dataset, untuned)))
    assert len(shared) == 6


def test_another_text_is_another_run(dataset):
    mine = distinct(entries_of(a_plan(), dataset, untuned))
    others = distinct(entries_of(a_plan(), replace(dataset, digest="1" * 64), untuned))
    assert not {run.digest for run in mine} & {run.digest for run in others}


def test_a_shortened_arm_has_a_whole_schedule_of_its_own(dataset):
    arms = {"all": {}, "half": {"length": 0.5}}
    found = {entry.arm: dict(entry.run.flags) for entry in entries_of(a_plan(arms=arms, seeds=1), dataset, untuned)}
    assert int(found["half"]["train-iters"]) == pytest.approx(int(found["all"]["train-iters"]) / 2, abs=1)
    for flags in found.values():  # Megatron's decay ends with the run unless it is told otherwise
        assert "lr-decay-iters" not in flags
        assert int(flags["lr-warmup-iters"]) == round(0.05 * int(flags["train-iters"]))


def test_the_last_learning_rate_follows_the_peak(dataset):
    arms = {"a": {"flags": {"lr": 8e-3}}}
    (entry, *_) = entries_of(a_plan(arms=arms), dataset, untuned)
    assert entry.run.value("min-lr") == "0.0008"


@pytest.mark.parametrize("steps", [6, 1960])
def test_the_whole_validation_text_is_read_once_after_the_last_step(steps, dataset):
    (entry, *_) = entries_of(a_plan(sizes=["tiny"], steps={"tiny": steps}), dataset, untuned)
    assert int(entry.run.value("eval-interval")) > steps  # Megatron evaluates after the last step in any case
    assert validation_batches(entry.run, dataset) * 8 * 256 + 1 == 20_481
    assert validation_batches(entry.run, replace(dataset, validation_tokens=20_480)) == 9, "the last one is not whole"


def test_a_plan_about_time_alone_reads_one_batch_of_it(dataset):
    claim = {"says": "b is faster", "arm": "b", "than": "a", "metric": "seconds_per_step"}
    arms = {"a": {}, "b": {"flags": {"simreg-lambda": 1}}}
    (entry, *others) = entries_of(a_plan(arms=arms, claims=[claim], seeds=3), dataset, untuned)
    assert "".join(found.arm for found in [entry, *others]) == "baabba", "no arm is always the first"
    assert validation_batches(entry.run, dataset) == 1 and "--eval-iters 1" in entry.run.words
    (entry, *_) = entries_of(a_plan(arms=arms, claims=[claim, claim | {"metric": "simreg_loss"}]), dataset, untuned)
    assert validation_batches(entry.run, dataset) == 10 and "--eval-iters" not in entry.run.words


@pytest.mark.parametrize(("width", "parameters"), [(64, 201_280), (96, 443_232), (128, 803_968), (192, 1_771_200)])
def test_parameters_outside_the_embeddings(width, parameters):
    shape = Shape(width)
    d, f = width, shape.ffn
    layer = d * (3 * d) + d * d + d * (2 * f) + f * d + 2 * d  # qkv, projection, gate and up, down, two norms
    assert shape.parameters == 4 * layer + d == parameters


def test_tokens_for_each_parameter(dataset):
    (entry, *_) = entries_of(a_plan(tokens_per_parameter=[20, 40]), dataset, untuned)
    assert tokens_of(entry.run) == pytest.approx(20 * Shape(64).parameters, rel=1e-3)


def test_a_width_that_no_head_fits_is_refused():
    with pytest.raises(ReproduceError, match="multiple of 32"):
        Shape(100)


def test_quick_takes_a_few_steps_of_two_seeds(dataset):
    found = entries_of(a_plan(sizes=[64, 96], seeds=5), dataset, untuned, quick=True)
    assert {entry.size for entry in found} == {64}
    assert {entry.seed for entry in found} == {1, 2}
    assert all(entry.run.steps <= 10 for entry in found)


def test_a_run_is_named_after_what_a_person_looks_for():
    run = Run("llama", (("hidden-size", "64"), ("seed", "3"), ("train-iters", "1960")), "0" * 64)
    assert run.name == f"64-seed3-1960-{run.digest[:12]}"


class TestRealSizes:
    """A preset has the paper's settings and its own length; nobody tuned it here."""

    def runs(self, name: str, model: str, dataset: Dataset):
        plan = replace(read_plan(name), sizes=(model,), seeds=1)
        search = read_plan(plan.tuned_in)
        tuned = tuned_in(search, entries_of(search, dataset, untuned), Store(Path("/nonexistent")))
        return {entry.arm: entry.run for entry in entries_of(plan, dataset, tuned)}

    def test_it_is_as_long_as_the_paper_trains_and_reads_as_much(self, dataset: Dataset) -> None:
        runs = self.runs("convergence", "350m", dataset)
        assert {run.steps for run in runs.values()} == {12_500}
        assert tokens_of(runs["simreg-chunk"]) == 12_500 * 512 * 2048
        assert validation_batches(runs["simreg-chunk"], dataset) == max(
            1, (dataset.validation_tokens - 1) // 2048 // 512
        )

    def test_arms_differ_by_simreg_alone(self, dataset: Dataset) -> None:
        runs = self.runs("convergence", "7b", dataset)
        plain, simreg = dict(runs["cross-entropy"].flags), dict(runs["simreg-chunk"].flags)
        assert simreg == plain | {"simreg-lambda": "auto"}
        assert not {"lr", "min-lr", "weight-decay", "lr-warmup-iters"} & set(plain), "the preset's"

    def test_a_shorter_arm_is_a_share_of_it(self, dataset: Dataset) -> None:
        assert self.runs("saving", "350m", dataset)["simreg-70"].steps == 8_750

    def test_there_is_no_other(self, dataset: Dataset) -> None:
        with pytest.raises(ReproduceError, match=r"no preset 99b of llama: choose from 1\.3b, 350m, 3b, 7b, tiny"):
            self.runs("convergence", "99b", dataset)

    def test_how_many_seeds_must_be_said(self, tmp_path: Path) -> None:
        words = ["reproduce", "convergence", "--model", "350m", "--dry-run", "--output", str(tmp_path)]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 2 and "convergence states no number of seeds for 350m: give --seeds N" in done.stderr
