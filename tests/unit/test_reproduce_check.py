# SPDX-License-Identifier: Apache-2.0
"""`simreg-megatron report check`: an honest folder passes, and each doctored copy of it is refused by name."""

import csv
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from benchmarks import claims
from simreg_megatron.cli import app
from simreg_megatron.report.welch import holm, welch
from simreg_megatron.reproduce.check import Table, measured_steps, read_tables, settings_of, violations
from simreg_megatron.reproduce.conclusion import Together, notes, verdicts_on
from simreg_megatron.reproduce.dataset import Dataset
from simreg_megatron.reproduce.errors import ReproduceError
from simreg_megatron.reproduce.pace import Pace, pace
from simreg_megatron.reproduce.plan_file import plan_names, plan_of, read_plan
from simreg_megatron.reproduce.runs import entries_of
from simreg_megatron.reproduce.store import DIVERGED, DONE, MACHINE, Store
from simreg_megatron.reproduce.tuned import tuned_in, untuned
from simreg_megatron.reproduce.verdict import Place, judge, machines_of

SEARCH = {
    "name": "search", "question": "Which settings?", "sizes": [64], "seeds": 1,
    "arms": {
        "plain": {"flags": {"simreg-objective": "none"}, "trials": {"lr": [2e-3, 4e-3, 8e-3]}},
        "simreg": {"trials": {"lr": [2e-3, 4e-3, 8e-3]}},
    },
}  # fmt: skip
MINE = {
    "name": "mine", "question": "Does it help?", "sizes": [64], "seeds": 5, "tuned_in": "search",
    "claims": [
        {"says": "SimReg ends lower", "arm": "simreg", "than": "plain", "headline": True},
        {"says": "SimReg with 70 % ends lower", "arm": "simreg-70", "than": "plain"},
        {"says": "SimReg raises the margin", "arm": "simreg", "than": "plain", "metric": "margin", "sign": "higher"},
        {"says": "SimReg needs fewer bits", "arm": "simreg", "than": "plain", "metric": "bits_per_byte"},
    ],
    "arms": {
        "plain": {"tuned_as": "plain"}, "plain-70": {"tuned_as": "plain", "length": 0.7},
        "simreg": {"tuned_as": "simreg"}, "simreg-70": {"tuned_as": "simreg", "length": 0.7},
    },
}  # fmt: skip
LEVEL = {"plain": 4.00, "plain-70": 4.06, "simreg": 3.95, "simreg-70": 4.01}
NOISE = (0.004, -0.006, 0.001, 0.003, -0.002)  # of the seeds


def loss_of(entry) -> float:
    if entry.trial:
        return {"0.002": 4.2, "0.004": 4.1, "0.008": 4.3}[entry.run.value("lr")]
    return LEVEL[entry.arm] + NOISE[entry.seed - 1]


@pytest.fixture
def results(tmp_path) -> Path:
    """A folder as `reproduce` leaves it, with losses that are known."""
    store, dataset = (
        Store(tmp_path / "results"),
        Dataset(tmp_path, digest="ab" * 32, bytes_per_token=4.0, validation_tokens=20_481),
    )
    search, mine = plan_of(SEARCH, where="search"), plan_of(MINE, where="mine")
    searched = entries_of(search, dataset, untuned)
    _fill(store, search, searched)
    _fill(store, mine, entries_of(mine, dataset, tuned_in(search, searched, store)))
    return store.folder


def ends_of(loss):
    return {"validation_loss": loss, "bits_per_byte": loss / 4}


def _fill(store, plan, entries):
    for number, entry in enumerate(entries):
        loss = loss_of(entry)
        curve = [[entry.run.steps // 2, loss + 1], [entry.run.steps, loss]]
        way = [[entry.run.steps // 2, loss + 1 + number / 1000], [entry.run.steps, loss]]
        steps = range(1, entry.run.steps + 1, 10)
        margin = 5 - loss  # reached before the last tenth
        margins = [[step, margin if step > entry.run.steps // 2 else 0.0] for step in steps]
        curves = {"validation_loss": curve, "train_loss": way, "margin": margins}
        kept = {"version": "0.1.0", "commit": "abc", "curves": curves}
        store.run_folder(entry.run).mkdir(parents=True, exist_ok=True)
        store.keep(entry.run, {"status": DONE, "train_loss": loss, "margin": margin, **ends_of(loss), **kept})
    store.write_tables(plan, entries)


def check(folder):
    return CliRunner().invoke(app, ["report", "check", str(folder)])


def rewrite(path: Path, change):
    with path.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    names = list(rows[0])
    rows = change(rows)
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, names)
        writer.writeheader()
        writer.writerows(rows)


def refused(results, name, doctor, words):
    rewrite(results / name, doctor)
    found = check(results)
    assert found.exit_code == 1
    assert words in found.output
    assert "Held" not in found.output


def only(rows, **wanted):
    return next(row for row in rows if all(row[name] == value for name, value in wanted.items()))


def test_honest_results_pass_and_each_claim_has_a_verdict(results):
    found = check(results)
    assert found.exit_code == 0, found.output
    assert "Held: SimReg ends lower." in found.output
    opposite = "Did not hold, the opposite was seen: SimReg with 70 % ends lower. Size 64, 20 tokens a parameter, "
    assert f"{opposite}validation loss of simreg-70 less that of plain: +0.0100 nats per token" in found.output
    assert "refused" not in found.output


def _without_seeds(rows):
    return [row for row in rows if row["seed"] in ("1", "2", "3")]


def _repeated_seed(rows):
    return [*rows, only(rows, arm="simreg", seed="2")]


def _other_text(rows):
    only(rows, arm="simreg", seed="1")["data"] = "cd" * 32
    return rows


def _before_the_end(rows):
    row = only(rows, arm="simreg", seed="1")
    row["steps"] = str(int(row["steps"]) // 2)
    return rows


def _longer_decay(rows):
    row = only(rows, arm="plain", seed="1")
    row["flags"] += " --lr-decay-iters 999999"
    return rows


def _without_the_worst(rows):
    rows.remove(max((row for row in rows if row["arm"] == "simreg"), key=lambda row: float(row["validation_loss"])))
    return rows


def _better_settings(rows):
    for row in rows:
        if row["arm"] == "simreg":
            row["flags"] = row["flags"].replace("--lr 0.004", "--lr 0.002")
    return rows


def _better_loss(rows):
    row = only(rows, arm="simreg", seed="1")
    row["validation_loss"] = str(float(row["validation_loss"]) - 0.02)
    return rows


def _copied_seed(rows):
    one, other = (only(rows, arm="simreg", seed=seed) for seed in "12")
    other.update({name: one[name] for name in ("validation_loss", "bits_per_byte", "train_loss")})
    return rows


def _failed(rows):
    row = only(rows, arm="simreg-70", seed="1")
    row.update(status="failed", validation_loss="", bits_per_byte="")
    return rows


def _with(**changes):
    """SimReg's first seed says something else."""

    def doctor(rows):
        only(rows, arm="simreg", seed="1").update(changes)
        return rows

    return doctor


def _further_run(rows):
    return [*rows, {**only(rows, arm="simreg", seed="2"), "seed": "6", "train_loss": "3.9"}]


@pytest.mark.parametrize(
    ("doctor", "words"),
    [
        (_without_seeds, "seed 4 is missing"),
        (_repeated_seed, "has seed 2 2 times"),
        (_other_text, "2 different texts"),
        (_with(device="NVIDIA H100"), "mine: its runs were trained on NVIDIA H100 in fp32 and on cpu in fp32"),
        (_with(number_type="bf16"), "mine: its runs were trained on cpu in bf16 and on cpu in fp32"),
        (_before_the_end, "before the end of the decay"),
        (_longer_decay, "before the end of the decay"),
        (_without_the_worst, "selects among results"),
        (_better_settings, "not run with the settings"),
        (_better_loss, "its curve ends at"),
        (_copied_seed, "the same numbers for the seeds 1 and 2: one of them is a copy"),
        (_with(margin="1.1"), "the margin of simreg, seed 1, is 1.1, and its curve ends otherwise"),
        (_with(bits_per_byte="0.98"), "its bits per byte are not its losses by one factor"),
        (_with(margin="nan"), "has the margin nan: no number can be compared with it"),
        (_with(isotropy="7"), "simreg, seed 1, has the isotropy 7, which can only be from 0 to 1"),
        (_with(seconds_per_step="-0.2"), "simreg, seed 1, has the seconds_per_step -0.2, which can only be from"),
        (_with(tokens="1"), "simreg at size 64, seed 1 has 1 tokens, and its settings make"),
        (_further_run, "seed 6, is not in the plan"),
        (_failed, "simreg-70 at size 64, seed 1, is failed: a run is done or diverged, so run it again"),
        (_with(status="failed"), "simreg at size 64, seed 1, is failed: a run is done or diverged"),
        (_with(status=DIVERGED), "seed 1, is diverged and has a validation loss, 3.954"),
    ],
)
def test_a_doctored_table_is_refused(doctor, words, results):
    refused(results, "mine.csv", doctor, words)


def _cut(points):
    """The margins of one run, as far as they stood at 0."""
    run = points[-1]["run"]
    return [each for each in points if (each["run"], each["tag"]) != (run, "margin") or int(each["step"]) < 900]


def _no_way(points):
    return [each for each in points if (each["run"], each["tag"]) != (points[-1]["run"], "train_loss")]


def _two_ends(points):
    end = [each for each in points if (each["run"], each["tag"]) == (points[-1]["run"], "validation_loss")][-1]
    return [*points, {**end, "value": "3.5"}]


def _one_arm_for_two(points):
    """All but one digit of it."""
    ways = {}
    for point in points:
        if point["tag"] == "train_loss":
            ways.setdefault(point["run"], []).append(point)
    one, other = next(iter(ways.values())), list(ways.values())[11]
    for mine, theirs in zip(one, other, strict=True):
        theirs.update({name: mine[name] for name in ("step", "value")})
    return points


def _one_way_for_two(points):
    ways = {}
    for point in points:
        if point["tag"] == "train_loss":
            ways.setdefault(point["run"], []).append(point)
    one, other = list(ways.values())[-5], list(ways.values())[-1]  # of one arm, of which there are four
    for mine, theirs in zip(one, other, strict=True):
        theirs["value"] = mine["value"]
    return points


@pytest.mark.parametrize(
    ("doctor", "words"),
    [
        (_cut, "the margin of simreg-70, seed 5, has a curve that ends at step 891 of 1376"),
        (_one_way_for_two, "at size 64 simreg-70, seed 5, has the curve of simreg-70, seed 4: one of them is a copy"),
        (_one_arm_for_two, "at size 64 simreg-70, seed 3, has the curve of plain, seed 1: one of them is a copy"),
        (_no_way, "simreg-70, seed 5, has no training curve"),
        (_two_ends, "the validation_loss curve of simreg-70, seed 5 has a step twice, or before an earlier one"),
    ],
)
def test_a_doctored_curve_is_refused(doctor, words, results):
    refused(results, "mine-curves.csv", doctor, words)


def _loss_is_nan(rows):
    only(rows, arm="simreg", seed="1")["validation_loss"] = "nan"
    return rows


def test_a_loss_that_is_no_number_is_refused(results):
    kept = (results / "mine.csv").read_text()
    rewrite(results / "mine.csv", _loss_is_nan)
    assert "seed 1, has the validation loss nan: no number can be compared with it" in check(results).output
    (results / "mine.csv").write_text(kept)
    rewrite(results / "mine-curves.csv", lambda points: [
        {**each, "value": "nan" if (each["tag"], each["step"]) == ("validation_loss", "1966") else each["value"]}
        for each in points
    ])  # fmt: skip
    found = check(results)
    assert found.exit_code == 1 and "its curve ends at nan in step 1966" in found.output
    rewrite(results / "search.csv", lambda rows: [
        {**row, "validation_loss": "nan" if row["trial"] == "1" else row["validation_loss"]} for row in rows
    ])  # fmt: skip
    assert settings_of(plan_of(MINE, where="m"), read_tables(results))("plain", 64)["lr"] == "0.004", (
        "the best of others"
    )


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("mine.csv", lambda text: text.replace("commit", "version2", 1), "mine.csv has no column commit"),
        ("mine.csv", lambda text: text.replace(",", ";"), "columns are parted by commas"),
        ("mine-curves.csv", lambda text: text.replace("run,", "rum,", 1), "mine-curves.csv has no column run"),
        ("mine.plan.json", lambda text: text[:50], "mine.plan.json cannot be read"),
        ("mine.csv", lambda text: text.partition("\n")[0], "mine: its table has no runs: copy it again"),
    ],
)
def test_a_damaged_file_is_named(name, change, words, results):
    path = results / name
    path.write_text(change(path.read_text()))
    found = check(results)
    assert found.exit_code in (1, 2) and words in found.output.replace("\n", " "), found.output
    assert found.exception is None or isinstance(found.exception, SystemExit)


def test_a_table_without_its_plan_is_not_passed_over(results):
    (results / "mine.plan.json").unlink()
    found = check(results)
    assert found.exit_code == 2 and "mine.plan.json is missing beside mine-curves.csv" in found.stderr


def test_a_table_that_a_spreadsheet_saved_is_read(results):
    for path in results.glob("*.csv"):
        path.write_text("\ufeff" + path.read_text())
    assert check(results).exit_code == 0


def test_a_question_is_no_markup(results):
    path = results / "mine.plan.json"
    path.write_text(path.read_text().replace("Does it help?", "Does [/bold] [green]it[/x] help?"))
    found = check(results)
    assert found.exit_code == 0 and "mine: Does [/bold] [green]it[/x] help?" in found.output


def test_a_run_with_other_numbers_in_another_table_is_refused(results):
    for path in results.glob("mine*"):
        twin = path.with_name(path.name.replace("mine", "twin"))
        twin.write_text(path.read_text().replace('"name": "mine"', '"name": "twin"'))
    assert check(results).exit_code == 0
    rewrite(results / "mine.csv", _better_loss)
    assert "mine: simreg, seed 1, has another validation_loss (3.934) than the same run in twin (3.954)" in (
        check(results).output
    )


def test_a_run_on_another_device_in_another_table_is_refused(results):
    for path in results.glob("mine*"):
        twin = path.with_name(path.name.replace("mine", "twin"))
        twin.write_text(path.read_text().replace('"name": "mine"', '"name": "twin"'))
    rewrite(results / "twin.csv", lambda rows: [{**row, "device": "NVIDIA H100"} for row in rows])
    assert "mine: plain, seed 1, has another device (cpu) than the same run in twin (NVIDIA H100)" in (
        check(results).output
    )
    with pytest.raises(ReproduceError, match="they have one run with another device each"):
        Store(results)


def test_tables_that_name_no_device_were_made_on_a_cpu(results):
    """Those of before go on: their runs are known by the same digests."""
    (results / "mine.csv").rename(results / "new.csv")
    with (results / "new.csv").open(newline="") as new, (results / "mine.csv").open("w", newline="") as old:
        rows = list(csv.DictReader(new))
        writer = csv.DictWriter(old, [name for name in rows[0] if name not in MACHINE], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    (results / "new.csv").unlink()
    assert check(results).exit_code == 0
    assert machines_of(read_tables(results)["mine"].rows) == {"cpu in fp32"}


def _noted(results, tmp_path, **changes):
    """The notes and the first verdict of another plan on the same text, run as it says."""
    store, search = Store(results), plan_of(SEARCH, where="search")
    dataset = Dataset(tmp_path, digest="ab" * 32, bytes_per_token=4.0, validation_tokens=20_481)
    plan = plan_of({**MINE, "name": "other", **changes}, where="other")
    tuned = tuned_in(search, entries_of(search, dataset, untuned), store) if plan.tuned_in else untuned
    _fill(store, plan, entries_of(plan, dataset, tuned))
    tables = read_tables(results)
    assert violations("other", tables) == []
    return " ".join(notes("other", tables)), verdicts_on("other", tables)[0]


def test_a_baseline_that_is_set_by_hand_makes_no_headline(results, tmp_path):
    for number, flags in enumerate(({"plain": {"lr": 2e-3}}, {arm: {"lr": 2e-3} for arm in MINE["arms"]})):
        arms = {name: {**arm, "flags": flags.get(name, {})} for name, arm in MINE["arms"].items()}
        told, verdict = _noted(results, tmp_path, arms=arms, claims=MINE["claims"][:1])
        assert verdict.held and not verdict.is_headline and "No headline: how well each arm" in verdict.sentence
        by_hand = "plain (lr 0.002)" if number == 0 else "plain (lr 0.002); simreg (lr 0.002)"
        assert f"these arms do not have what the search found, but what the plan says: {by_hand}" in told


def test_an_arm_with_another_model_makes_no_headline(results, tmp_path):
    """A method may differ from the baseline in its own flags, not in what nobody searched."""
    for flags, headline in (({"hidden-dropout": 0.5}, False), ({"simreg-chunk-size": 0, "adagc": None}, True)):
        arms = {name: dict(arm) for name, arm in MINE["arms"].items()}
        arms["simreg"]["flags"] = flags
        _, verdict = _noted(results, tmp_path, arms=arms)
        assert verdict.held and verdict.is_headline is headline
    shared = {name: {**arm, "flags": {"hidden-dropout": 0.5}} for name, arm in MINE["arms"].items()}
    assert _noted(results, tmp_path, arms=shared)[1].is_headline, "all arms alike"


def test_a_search_that_left_out_trials_is_told_of_where_its_settings_are_used(results):
    plan = json.loads((results / "mine.plan.json").read_text()) | {"tuned_in": "tuning"}
    search = json.loads((results / "search.plan.json").read_text()) | {"name": "tuning"}
    (results / "mine.plan.json").write_text(json.dumps(plan))
    (results / "tuning.plan.json").write_text(json.dumps(search))
    for name in ("search.csv", "search-curves.csv"):
        (results / name).rename(results / name.replace("search", "tuning"))
    (results / "search.plan.json").unlink()
    assert any(
        told.startswith("its search tuning: ") and "arms" in told for told in notes("mine", read_tables(results))
    )


def test_tables_that_are_used_again_lose_nothing(results, tmp_path):
    """A run of several tables once had the curves of the last by name, which may keep few points of some."""
    kept = tmp_path / "kept"
    kept.mkdir()
    for path in results.glob("*.*"):
        (kept / path.name).write_text(path.read_text())
    for ending in (".csv", "-curves.csv", ".plan.json"):
        text = (kept / f"mine{ending}").read_text()
        (kept / f"zuletzt{ending}").write_text(text.replace('"name": "mine"', '"name": "zuletzt"'))
    rewrite(kept / "zuletzt-curves.csv", lambda points: [each for each in points if each["tag"] != "margin"][::2])
    rewrite(kept / "zuletzt.csv", lambda rows: [{**row, "margin": ""} for row in rows])
    before = read_tables(kept)
    dataset = Dataset(tmp_path, digest="ab" * 32, bytes_per_token=4.0, validation_tokens=20_481)
    store, plan = Store(kept), before["mine"].plan
    search = before["search"].plan
    store.write_tables(plan, entries_of(plan, dataset, tuned_in(search, entries_of(search, dataset, untuned), store)))
    after = read_tables(kept)
    assert violations("mine", after) == [] and len(after["mine"].curves) == len(before["mine"].curves)
    assert {row["margin"] for row in after["mine"].rows} == {row["margin"] for row in before["mine"].rows} != {""}


def test_a_table_under_another_name_is_refused(results):
    for ending in (".csv", "-curves.csv", ".plan.json"):
        (results / f"more{ending}").write_text((results / f"mine{ending}").read_text())
    found = check(results)
    assert found.exit_code == 2 and "more.plan.json is the plan mine, and its name says more" in found.output


def test_arms_of_no_search_make_no_headline(results, tmp_path):
    arms = {name: {**arm, "tuned_as": "", "flags": {"lr": 2e-3}} for name, arm in MINE["arms"].items()}
    arms["simreg"]["flags"] |= {"simreg-lambda": 1}
    arms["simreg-70"]["flags"] |= {"simreg-lambda": 1}
    told, verdict = _noted(results, tmp_path, arms=arms, tuned_in="")
    assert verdict.held and not verdict.is_headline
    assert "no search found the settings of its arms, so a difference may be the settings'" in told


def test_a_search_on_another_text_makes_no_headline(results):
    rewrite(results / "search.csv", lambda rows: [{**row, "data": "cd" * 32} for row in rows])
    tables = read_tables(results)
    assert "the search for its settings was made on another text" in notes("mine", tables)
    assert not verdicts_on("mine", tables)[0].is_headline


def test_a_verdict_says_what_was_compared_whatever_the_claim_says(results):
    found = verdicts_on("mine", read_tables(results))
    assert "tokens a parameter, validation loss of simreg less that of plain: -0.0500" in found[0].sentence
    assert "tokens a parameter, margin of simreg less that of plain: +0.0500" in found[2].sentence
    multiple = replace(found[0], claim=replace(found[0].claim, metric="seconds_per_step", times=1.05))
    assert multiple.compared == "seconds per step of simreg less 1.05 times that of plain"


def test_the_number_of_tests_counts_together(results):
    """Holm: the lowest of four p-values must be below 0.0125, the next below 0.0167."""
    assert [holm(values) for values in ([0.01, 0.04, 0.03, 0.005], [0.02] * 3, [0.01] * 3, [])] == [2, 0, 3, 0]
    verdicts = verdicts_on("mine", read_tables(results))[:2]

    def told(*p_values):
        tests = [replace(verdicts[0], p_value=value, means=(number, 1)) for number, value in enumerate(p_values)]
        return Together.of(tests).sentence

    assert told(0.02) == "", "one test is no number of tests"
    assert told(0.01, 0.9).endswith(
        "1 held. Corrected for their number (Holm), 1 are decided, for the claim or against it: those with a "
        "two-sided p up to 0.02."
    )
    assert "2 held" in told(0.02, 0.03) and told(0.02, 0.03).endswith("0 are decided, for the claim or against it.")
    assert "1 held" in told(0.01, 0.99) and "(Holm), 2 are decided" in told(0.01, 0.99), "the second is seen reversed"
    assert Together.of([verdicts[0]] * 50).tests == [verdicts[0]], "one comparison is one test"
    assert replace(verdicts[0], p_value=0.03, claim=replace(verdicts[0].claim, sign="differs")).two_sided == 0.03
    assert check(results).output.rstrip().splitlines()[-1].startswith("Of 4 tests, each at 0.05 by itself, 3 held.")


def test_unequal_tuning_is_refused(results):
    rewrite(results / "search.csv", lambda rows: [row for row in rows if (row["arm"], row["trial"]) != ("plain", "3")])
    found = check(results)
    assert found.exit_code == 1
    assert "tuned unequally at size 64 (plain 2, simreg 3 trials)" in found.output


def test_a_search_that_is_complete_nowhere_is_refused(results):
    rewrite(results / "search.csv", lambda rows: [row for row in rows if row["trial"] != "3"])
    assert "the search search is complete at no size: run what is missing" in check(results).output


def test_a_search_that_would_have_chosen_otherwise_is_noticed(results):
    def change(rows):
        row = only(rows, arm="simreg", trial="3")
        row["validation_loss"], row["bits_per_byte"] = "3.9", "0.975"
        only(curves, run=row["run"], step=row["steps"])["value"] = "3.9"
        return rows

    with (results / "search-curves.csv").open(newline="") as stream:
        curves = list(csv.DictReader(stream))
    rewrite(results / "search.csv", change)
    rewrite(results / "search-curves.csv", lambda _: curves)
    assert "not run with the settings that the plan and its search call for" in check(results).output


def test_nothing_follows_from_a_search_that_breaks_the_rules(results):
    def change(rows):
        only(rows, arm="plain", trial="1")["validation_loss"] = "4.15"  # not the best, so the same settings follow
        return rows

    rewrite(results / "search.csv", change)
    found = check(results)
    assert found.exit_code == 1 and "Held" not in found.output
    assert "refused: mine: its settings come from a search that allows no conclusion: search: " in found.output


def test_a_search_that_goes_on_at_another_size_forbids_nothing(results):
    path = results / "search.plan.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "sizes": [64, 96]}))
    tables = read_tables(results)
    assert violations("search", tables) and not violations("mine", tables)


@pytest.mark.parametrize(("seeds", "words"), [(2, "2 seeds at size 64 are too few"), (4, "rests on 4 seeds")])
def test_too_few_seeds_are_refused_also_where_the_plan_says_so(seeds, words, results):
    path = results / "mine.plan.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "seeds": seeds}))
    rewrite(results / "mine.csv", lambda rows: [row for row in rows if int(row["seed"]) <= seeds])
    found = check(results)
    assert found.exit_code == 1
    assert words in found.output
    told = "5 are needed" in found.output
    assert told == (seeds == 4), "four seeds decide the claim, and are no headline"
    assert ("Held: SimReg ends lower. " in found.output) == (seeds == 4)


def test_results_without_the_search_are_refused(results):
    for path in results.glob("search*"):
        path.unlink()
    assert "the table of search, where the arms were tuned, is missing" in check(results).output


def test_a_folder_without_results_is_named(tmp_path):
    found = check(tmp_path)
    assert found.exit_code == 2
    assert "holds no results" in found.output


def test_the_page_tells_questions_verdicts_and_numbers_and_needs_no_network(results, tmp_path):
    found = CliRunner().invoke(app, ["report", "page", str(results), "--output", str(tmp_path / "page.html")])
    assert found.exit_code == 0, found.output
    text = (tmp_path / "page.html").read_text()
    assert "Does it help?" in text and "Held: SimReg ends lower." in text
    assert "<td>3.95 (" in text  # the mean of an arm
    assert text.count("<svg") == 4
    assert not re.search(r"(src|href)=\"https?:", re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL))


def test_the_page_gives_no_verdict_on_a_doctored_table(results, tmp_path):
    rewrite(results / "mine.csv", _without_the_worst)
    CliRunner().invoke(app, ["report", "page", str(results), "--output", str(tmp_path / "page.html")])
    text = (tmp_path / "page.html").read_text()
    assert "No conclusion" in text and "Held" not in text


def test_the_verdict_is_welchs(results):
    tables = read_tables(results)
    assert violations("mine", tables) == []
    first, second, *_ = judge(tables["mine"].plan, tables["mine"].rows)
    simreg, plain = ([LEVEL[arm] + noise for noise in NOISE] for arm in ("simreg", "plain"))
    by_scipy = stats.ttest_ind(simreg, plain, equal_var=False, alternative="less")
    assert first.place == Place("64", "20")
    assert first.difference == pytest.approx(-0.05, abs=1e-5)
    assert first.p_value == pytest.approx(by_scipy.pvalue, rel=1e-2)  # six digits are in the table
    assert first.noise == pytest.approx(math.sqrt(sum((n - sum(NOISE) / 5) ** 2 for n in NOISE) / 4), abs=1e-5)
    assert first.interval[0] < -0.05 < first.interval[1] < 0
    assert first.held
    assert not second.held


def test_the_saving_is_what_the_baseline_would_need_more(results):
    tables = read_tables(results)
    first, second, *_ = judge(tables["mine"].plan, tables["mine"].rows)
    steps = int(only(tables["mine"].rows, arm="plain")["steps"])
    short = int(only(tables["mine"].rows, arm="plain-70")["steps"])
    rate = 100 * 0.06 / (steps - short)
    assert first.worth.exchange == pytest.approx(rate, rel=1e-3)
    more = 0.05 / rate * 100
    assert first.worth.tokens == pytest.approx(more / (steps + more), rel=1e-3)
    assert not second.worth.is_underestimate  # it ended higher


def _seconds_of(results, name, seconds):
    def change(rows):
        for row in rows:
            row["seconds_per_step"] = str(seconds[row["arm"].removesuffix("-70")])
        return rows

    rewrite(results / f"{name}.csv", change)


def _scattered(row):
    times = {1: 0.99, 2: 1.0, 3: 1 / 0.99}[int(row["seed"])]
    return {**row, "seconds_per_step": str(float(row["seconds_per_step"]) * times)}


RUNTIME = {
    "name": "runtime", "question": "How much longer?", "sizes": [64], "seeds": 3,
    "arms": {"megatron": {"flags": {"plain": None}}, "lambda-1": {"flags": {"simreg-lambda": 1}},
             "whole": {"flags": {"simreg-lambda": 1, "simreg-chunk-size": 0}}},
}  # fmt: skip


def test_the_seconds_of_the_experiment_runtime_count_before_those_of_the_runs(results, tmp_path, monkeypatch):
    _seconds_of(results, "mine", {"plain": 0.20, "simreg": 0.30})
    plan = plan_of(RUNTIME, where="runtime")
    entries = entries_of(
        plan, Dataset(tmp_path, digest="ab" * 32, bytes_per_token=4.0, validation_tokens=20_481), untuned
    )
    monkeypatch.setitem(globals(), "loss_of", lambda entry: 4.0 + NOISE[entry.seed - 1])
    _fill(Store(results), plan, entries)
    _seconds_of(results, "runtime", {"megatron": 0.10, "lambda-1": 0.102, "whole": 0.2})
    rewrite(results / "runtime.csv", lambda rows: [_scattered(row) for row in rows])
    rewrite(results / "mine.csv", lambda rows: rows)
    tables = read_tables(results)
    assert violations("runtime", tables) == [] and len(measured_steps(tables)) == 9
    weighted = [
        {**row, "flags": f"{row['flags']} --simreg-lambda 2"} for row in tables["mine"].rows if row["arm"] == "simreg"
    ]
    off = [row for row in tables["mine"].rows if row["arm"] == "plain"]
    place = Place("64", "20")
    measured = measured_steps(tables)
    found = pace([*weighted, *off], "simreg", "plain", place, measured)
    assert found.times == pytest.approx(1.02) and found.low < 1.02 < found.high
    whole = [{**row, "flags": f"{row['flags']} --simreg-chunk-size 0"} for row in weighted]
    assert pace([*whole, *off], "simreg", "plain", place, measured).times == pytest.approx(2.0)
    other = [{**row, "flags": f"{row['flags']} --simreg-objective creg"} for row in weighted]
    assert pace([*other, *off], "simreg", "plain", place, measured) is None, "nobody measured it"
    assert pace([*weighted, *off], "simreg", "plain", place, ()) is None, "what the runs logged is no measure"
    elsewhere = [{**row, "device": "NVIDIA H100"} for row in measured]
    assert pace([*weighted, *off], "simreg", "plain", place, elsewhere) is None, "steps take other times there"
    rewrite(results / "runtime.csv", lambda rows: rows[1:])
    assert measured_steps(read_tables(results)) == (), "a refused table measures nothing"


def test_time_is_saved_less_than_tokens_where_steps_are_longer(results, monkeypatch):
    assert "so what is saved is at least 20% of the tokens (" in check(results).output
    assert "how much of the time, the experiment runtime in the same folder tells" in check(results).output
    monkeypatch.setattr("simreg_megatron.reproduce.pace.pace", lambda *_: Pace(1.1, 1.05, 1.15))
    tokens = verdicts_on("mine", read_tables(results))[0].worth.tokens
    assert f", {1 - (1 - tokens) * 1.1:.0%} of the time (a step takes +10.0 %, +5.0 to +15.0)" in check(results).output


@pytest.mark.parametrize(
    ("measured", "saved"),
    [
        (Pace(1.1, 0.9, 1.3), 0.12),
        (Pace(0.9, 0.8, 0.95), 0.28),
        (Pace(0.9, 0.8, 1.05), 0.2),
    ],
    ids=["longer", "shorter", "shorter by chance"],
)
def test_a_step_that_is_shorter_by_chance_saves_nothing(measured, saved):
    assert measured.saved(0.2) == pytest.approx(saved)


def test_a_size_that_no_search_covered_is_no_headline_and_its_verdicts_say_so(results, tmp_path):
    store = Store(results)
    dataset = Dataset(tmp_path, digest="ab" * 32, bytes_per_token=4.0, validation_tokens=20_481)
    search, wide = plan_of(SEARCH, where="search"), plan_of({**MINE, "name": "wide", "sizes": [64, 96]}, where="wide")
    _fill(store, wide, entries_of(wide, dataset, tuned_in(search, entries_of(search, dataset, untuned), store)))
    of = {verdict.place.size: verdict for verdict in verdicts_on("wide", read_tables(results))[:2]}
    assert (of["64"].lender, of["96"].lender) == ("", "64")
    assert (of["64"].is_headline, of["96"].is_headline) == (True, False) and of["96"].held
    assert of["64"].sentence.startswith("Held: SimReg ends lower. Size 64")
    told = "Held, but at the settings of width 64, not tuned for this size: SimReg ends lower. Size 96"
    assert of["96"].sentence.startswith(told) and " No headline: how well each arm is tuned" in of["96"].sentence
    assert told in check(results).output


def test_a_shorter_arm_that_ends_lower_saves_its_shortness_as_well(results):
    def change(rows):
        for row in rows:
            if row["arm"] == "simreg-70":
                row["validation_loss"] = str(3.99 + NOISE[int(row["seed"]) - 1])
        return rows

    rewrite(results / "mine.csv", change)
    tables = read_tables(results)
    second = judge(tables["mine"].plan, tables["mine"].rows)[1]
    steps, short = (int(only(tables["mine"].rows, arm=arm)["steps"]) for arm in ("plain", "simreg-70"))
    more = 0.01 / second.worth.exchange * 100
    assert second.worth.tokens == pytest.approx(1 - short / (steps + more), rel=1e-3) and second.worth.tokens > 0.3


def test_a_shorter_baseline_of_another_table_tells_what_steps_are_worth(results, tmp_path):
    other = {**MINE, "name": "other", "claims": MINE["claims"][:1]}
    other["arms"] = {"plain-70": MINE["arms"]["plain-70"]}
    other["arms"]["plain-70-slow"] = {**MINE["arms"]["plain-70"], "flags": {"lr": 1e-3}}
    mine = {**MINE, "name": "long", "arms": {name: MINE["arms"][name] for name in ("plain", "simreg")}}
    mine["claims"] = MINE["claims"][:1]
    store = Store(results)
    dataset = Dataset(tmp_path, digest="ab" * 32, bytes_per_token=4.0, validation_tokens=20_481)
    search = plan_of(SEARCH, where="search")
    tuned = tuned_in(search, entries_of(search, dataset, untuned), store)
    other["claims"] = []
    LEVEL["plain-70-slow"] = 4.05  # the better one of that length
    for content in (mine, other):
        plan = plan_of(content, where="here")
        _fill(store, plan, entries_of(plan, dataset, tuned))
    tables = read_tables(results)
    assert not violations("long", tables) and not violations("other", tables)
    (verdict,) = verdicts_on("long", tables)
    assert verdict.worth.shorter == "plain-70-slow of other"
    own = verdicts_on("mine", tables)[0]
    assert own.worth.exchange == pytest.approx(verdict.worth.exchange), "the best baseline of that length, wherever"
    alone = verdicts_on("mine", {name: table for name, table in tables.items() if name in ("mine", "search")})[0]
    assert alone.worth.shorter == "plain-70" and alone.worth.exchange == pytest.approx(
        own.worth.exchange * 6 / 5, rel=1e-3
    )
    there = tuple({**row, "device": "NVIDIA H100"} for row in tables["other"].rows)
    elsewhere = {name: tables[name] for name in ("long", "search")} | {"other": replace(tables["other"], rows=there)}
    assert verdicts_on("long", elsewhere)[0].worth is None, "steps of runs on another device"
    rewrite(results / "other.csv", lambda rows: rows[1:])
    tables = read_tables(results)
    assert verdicts_on("long", tables)[0].worth.shorter == "plain-70 of mine", "a refused table tells nothing"


def test_what_qualifies_a_conclusion_is_noted(results):
    tables = read_tables(results)
    (unknown,) = notes("mine", tables)
    assert unknown.startswith("no plan mine ships with the package, and nothing in a folder shows whether a plan was")
    wider = replace(tables["mine"].plan, sizes=(64, 96), name="saving")
    rows = [{**row, "commit": row["seed"]} for row in tables["mine"].rows]
    several, settings, sizes, seeds, rest = notes("saving", {**tables, "saving": Table(wider, tuple(rows), ())})
    assert several == "its runs were made by several versions of the code (column commit)"
    assert settings.startswith("settings of width 64 used at 96: the arms are not tuned there")
    assert sizes == "sizes 64, 96, where the plan that ships says 32, 64, 96, 128"
    assert seeds == "seeds 5, where the plan that ships says 5 at 32, 5 at 64, 5 at 96, 3 at 128, 3 at tiny"
    assert rest == "question and arms and claims and tuned_in differ from those of the plan saving that ships"


def test_arms_whose_own_settings_nobody_searched_are_noted(results):
    tables = read_tables(results)
    mine = tables["mine"]

    def noted(**flags):
        arms = [replace(arm, flags={**arm.flags, "adagc": "", **flags.get(arm.name, {})}) for arm in mine.plan.arms]
        return notes("mine", {**tables, "mine": replace(mine, plan=replace(mine.plan, arms=tuple(arms)))})[:-1]

    assert noted() == [], "all arms have it"
    assert noted(plain={"simreg-objective": "none"}) == [], "the same training, measured"
    assert noted(simreg={"lr": "1e-3"}) == [
        "these arms do not have what the search found, but what the plan says: simreg (lr 1e-3)"
    ]
    assert noted(simreg={"simreg-objective": "sce", "lr": 1e-3}, plain={"qk-layernorm": ""}) == [
        "nothing was searched for what sets these arms apart: plain (qk-layernorm); "
        "simreg (lr 0.001, simreg-objective sce)"
    ]


def test_a_test_of_two_sides_needs_a_larger_difference():
    """By simulation, as for one side below: where its detectable difference is true, four in five are found."""
    draw = np.random.default_rng(0).normal
    sample = [-0.0063, 0.0037, 0.0017, -0.0013, 0.0022]
    one, two = (welch(sample, sample, side=side).detectable for side in ("less", "two-sided"))
    noise = float(np.std(sample, ddof=1))
    found = stats.ttest_ind(draw(two, noise, (5, 20000)), draw(0, noise, (5, 20000)), equal_var=False)
    assert (found.pvalue < 0.05).mean() == pytest.approx(0.8, abs=0.03)
    assert two > 1.15 * one


def test_a_run_that_diverged_decides_against_its_arm(results):
    def change(rows):
        row = only(rows, arm="simreg", seed="3")
        row["status"], row["validation_loss"] = DIVERGED, ""
        return rows

    rewrite(results / "mine.csv", change)
    (told,) = violations("mine", read_tables(results))
    assert "simreg, seed 3, is diverged, and its curve ends at 3.951 in its last step, 1966" in told
    run = only(read_tables(results)["mine"].rows, arm="simreg", seed="3")["run"]
    rewrite(results / "mine-curves.csv", lambda points: [
        each for each in points if (each["run"], each["tag"], each["step"]) != (run, "validation_loss", "1966")
    ])  # fmt: skip
    tables = read_tables(results)
    assert violations("mine", tables) == []
    verdict = judge(tables["mine"].plan, tables["mine"].rows)[0]
    assert not verdict.held and verdict.worth is None
    assert verdict.sentence == (
        "Not decided, as runs diverged: SimReg ends lower. Size 64, 20 tokens a parameter, "
        "validation loss of simreg less that of plain: 1 and 0 of 5 and 5 seeds diverged, so there is no difference "
        "to tell."
    )
    CliRunner().invoke(app, ["report", "page", str(results), "--output", str(results / "page.html")])
    assert not re.search(r"[^a-z](inf|nan)[^a-z]", (results / "page.md").read_text() + check(results).output)


def test_a_claim_may_compare_with_a_multiple(results):
    """3.95 is lower than 4.00, and not lower than 0.98 * 4.00 = 3.92."""
    table = read_tables(results)["mine"]
    for times, held in ((0.99, True), (0.98, False)):
        claims = (replace(table.plan.claims[0], times=times),)
        (verdict,) = judge(replace(table.plan, claims=claims), table.rows)
        assert verdict.held == held
        assert verdict.difference == pytest.approx(3.95 - times * 4.00 + sum(NOISE) / 5 * (1 - times), abs=1e-5)


def test_runs_that_did_not_measure_what_a_claim_is_about_decide_nothing(results):
    """As runs that an older version made; a run that diverged is another matter."""
    path = results / "mine.plan.json"
    content = json.loads(path.read_text())
    content["claims"][0] |= {"metric": "isotropy", "headline": False}
    path.write_text(json.dumps(content))
    found = check(results)
    assert found.exit_code == 1
    assert "plain, seed 1, has no isotropy, which 'SimReg ends lower' is about" in found.output


def test_the_detectable_difference_is_found_four_times_in_five(results):
    """By simulation: draws with a true difference of that size, judged the same way."""
    import numpy as np

    verdict = judge(*(lambda table: (table.plan, table.rows))(read_tables(results)["mine"]))[0]
    draw = np.random.default_rng(0).normal
    noise = verdict.noise
    found = stats.ttest_ind(
        draw(-verdict.detectable, noise, (5, 20000)), draw(0, noise, (5, 20000)), equal_var=False, alternative="less"
    )
    assert (found.pvalue < 0.05).mean() == pytest.approx(0.8, abs=0.03)


def test_the_paper_s_claims_stand_beside_what_was_seen(results, monkeypatch):
    """Without runs, and with a table that the protocol refuses, there is no verdict."""
    known = claims.Claimed("lower", "Figure 3", "mine", (0,))
    lines = (
        known,
        claims.Claimed("longer", "Figure 4", "horizon"),
        claims.Claimed("tasks", "Table 1", untestable="why"),
    )
    monkeypatch.setattr(claims, "OF_THE_PAPER", lines)
    monkeypatch.setattr(claims, "BEYOND_THE_PAPER", ())
    lower, longer, tasks = claims.table(read_tables(results))[2:]
    assert lower.startswith("| lower | Figure 3 | held | SimReg ends lower: held, -0.050 (")
    assert "5 and 5 seeds, width 64; " in lower and "SimReg with 70 %" not in lower
    assert longer == "| longer | Figure 4 | not tested yet | `simreg-megatron reproduce horizon` |"
    assert tasks == "| tasks | Table 1 | cannot be tested here | why |"
    rewrite(results / "mine.csv", _without_seeds)
    assert "not tested yet" in claims.table(read_tables(results))[2]


def test_the_opposite_needs_an_interval_beyond_0(results):
    """A one-sided test of the refuting claim is half as strict as the two-sided one that "the opposite" stands for."""
    held = verdicts_on("mine", read_tables(results))[0]
    assert held.word == "Held" and claims._refuted(held) == "Did not hold, the opposite was seen"
    assert claims._refuted(replace(held, interval=(-0.1, 0.001))) == "Not refuted"


def test_every_experiment_with_a_claim_stands_in_the_table_of_claims():
    told = {claimed.experiment for claimed in (*claims.OF_THE_PAPER, *claims.BEYOND_THE_PAPER)} - {""}
    assert told == {name for name in plan_names() if read_plan(name).claims}


@pytest.mark.parametrize("name", plan_names())
def test_a_claim_of_a_difference_says_so(name):
    """It is held where a difference was seen."""
    assert [claim.says for claim in read_plan(name).claims if claim.sign == "differs" and "alike" in claim.says] == []
