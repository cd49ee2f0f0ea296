# SPDX-License-Identifier: Apache-2.0
"""`simreg-megatron report RUN...`: what is read, what is concluded, and the page in both of its forms."""

from __future__ import annotations

import errno
import io
import json
import math
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from torch.utils.tensorboard import SummaryWriter
from typer.testing import CliRunner

from simreg_megatron.cli import app
from simreg_megatron.report import own, runs
from simreg_megatron.report.arms import Arm, read_arms
from simreg_megatron.report.curves import draw_curves
from simreg_megatron.report.heatmap import cosine_matrix
from simreg_megatron.report.page import Grid, Page, Section, as_html, as_markdown
from simreg_megatron.report.runs import ReportError, Run, Series
from simreg_megatron.report.welch import welch


def report(*words: object):
    return CliRunner().invoke(app, ["report", *map(str, words)], env={"COLUMNS": "200"})


def curve(*values: float, every: int = 100) -> Series:
    return Series(np.arange(1, len(values) + 1) * every, np.array(values))


def write_run(folder: Path, *losses: float, objective: str = "1.0", seconds: float | None = None) -> Path:
    """As the launcher leaves it: TensorBoard, the record of its start, and hidden states of a probe."""
    with SummaryWriter(str(folder / "tensorboard")) as writer:
        for number, loss in enumerate(losses, 1):
            writer.add_scalar(runs.VALIDATION_LOSS, loss, 100 * number)
            writer.add_scalar(runs.TRAIN_LOSS, loss + 0.1, 100 * number)
            writer.add_scalar("simreg margin", -loss, 100 * number)
            if seconds is not None:
                writer.add_scalar(runs.ITERATION_TIME, seconds, 100 * number)
        settings = {"seq_length": 256, "global_batch_size": 8, "simreg_lambda": objective, "save": folder, "lr": 0.002}
        for name, value in settings.items():
            writer.add_text(name, str(value), 0)
    record = folder / "record" / "20261122-060000"
    record.mkdir(parents=True)
    (record / "command.txt").write_text(f"python launch/pretrain_llama.sh --simreg-lambda {objective}\n")
    packages = {"torch": "2.13.0", "megatron-core": "0.19.2"}
    (record / "versions.json").write_text(json.dumps({"python": "3.12.1 (x)", "git": "abc123", "packages": packages}))
    hidden = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    np.savez(
        folder / "hidden-300.npz", hidden=hidden, tokens=np.array(list("abcdef")), labels=np.array([1, 2, 1, 3, 4, 5])
    )
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    plain = write_run(folder / "plain", 6.0, 5.0, 4.5, objective="0.0", seconds=0.50)
    return plain, write_run(folder / "simreg", 5.8, 4.6, 4.2, seconds=0.55)


@pytest.fixture(scope="module")
def written(pair, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    output = tmp_path_factory.mktemp("page") / "mine.html"
    done = report("--output", output, *pair)
    assert done.exit_code == 0, done.output
    return output, done.output


def test_options_may_stand_before_the_runs_and_the_verdict_is_said(written) -> None:
    assert "simreg against plain: -0.3000 nats per token, one seed each: no interval" in written[1]


def test_the_page_needs_no_network_and_has_every_part(written) -> None:
    text = written[0].read_text()
    bare = re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL)
    assert text.count("<svg") == 2 and not re.search(r"(src|href)=", bare)
    assert "--simreg-lambda 1.0" in bare and "commit abc123" in bare and "megatron-core 0.19.2" in bare
    assert "<td class=words>simreg_lambda</td><td>0.0</td><td>1.0</td>" in bare
    assert ">lr<" not in bare and ">save<" not in bare, "settings that do not differ, or say nothing"
    assert "<!-- Margin -->" in text, "the title of its panel, which is drawn"


def test_the_saving_is_of_tokens_and_of_time(written) -> None:
    """4.5 is reached a quarter of the way from step 200 (4.6) to 300 (4.2): at 225 of 300, with steps 10 % longer."""
    bare = written[0].read_text()
    row = re.search(r"<tr><td class=words>simreg</td><td>225</td>(.*?)</tr>", bare)
    assert row, "the step"
    cells = re.findall(r"<td[^>]*>(.*?)</td>", row[1])
    assert cells == ["25 %", own.AUTHORS_SAVING, "+10.0 %", own.AUTHORS_TIME, "18 %"]  # 1 - 0.75 * 1.1 = 0.175
    assert "means nothing" in bare, "of runs that shared their cores"


@pytest.mark.parametrize(
    ("settings", "objective"),
    [
        ({}, "?"),
        ({"simreg_lambda": "None"}, ""),
        ({"simreg_lambda": "0.0"}, ""),
        ({"simreg_lambda": "1", "simreg_objective": "none"}, ""),
        ({"simreg_lambda": "1", "simreg_objective": "None"}, "simreg"),
        ({"simreg_lambda": "1", "simreg_objective": "creg"}, "creg"),
    ],
)
def test_the_authors_stand_beside_their_own_pair_alone(settings: dict[str, str], objective: str) -> None:
    arm = Arm("a", (Run("a", {}, settings),), (Path(),))
    plain = Arm("b", (Run("b", {}, {"lr": "1"}),), (Path(),))
    assert arm.objective == objective
    assert own._beside(arm, plain, "theirs") == ("theirs" if objective == "simreg" else "-")
    assert own._beside(arm, arm, "theirs") == "-"


def test_the_markdown_has_pictures_of_both_kinds_beside_it(written) -> None:
    output, _ = written
    text = output.with_suffix(".md").read_text()
    links = re.findall(r"\((mine-pictures/[^)]+)\)", text)
    assert {Path(link).suffix for link in links} == {".png", ".svg"}
    for link in links:
        assert (output.parent / link).stat().st_size > 5_000
    assert "| simreg | 1 | 300 | 4.2000 | -0.3000 | one seed each |" in text


def arm(name: str, ends: tuple[float, ...], **settings: str) -> Arm:
    found = tuple(Run(name, {runs.VALIDATION_LOSS: curve(6.0, end)}, settings) for end in ends)
    return Arm(name, found, tuple(Path() for _ in ends))


def test_paths_of_one_name_are_seeds_and_have_an_interval() -> None:
    plain, simreg = (4.50, 4.52, 4.51), (4.40, 4.43, 4.41)
    page = own.page_of([arm("plain", plain), arm("simreg", simreg)])
    by_scipy = stats.ttest_ind(simreg, plain, equal_var=False).confidence_interval(0.95)
    (verdict,) = page.sections[0].verdicts
    assert verdict.startswith("simreg against plain: lower, -0.0967 nats per token")
    assert f"({by_scipy.low:+.4f} to {by_scipy.high:+.4f}" in verdict
    (verdict,) = own.page_of([arm("plain", plain), arm("same", (4.45, 4.59, 4.50))]).sections[0].verdicts
    assert "not told apart" in verdict


def test_a_diverged_run_decides_for_nothing() -> None:
    assert welch([4.0, float("inf")], [4.1, 4.2]).p_value == 1.0


@pytest.mark.parametrize(
    ("first", "other", "verdict", "loss", "interval"),
    [
        ((4.5,), (4.4, 4.3, 4.2), "-0.2000 nats per token, 3 and 1 seeds: no interval", "4.3000", "3 and 1 seeds"),
        ((4.5, 4.4), (4.2,), "1 and 2 seeds: no interval", "4.2000", "1 and 2 seeds"),
        ((4.5,), (math.nan,), "cannot be compared, as simreg diverged (", "simreg diverged", "-"),
        ((math.inf,), (4.2,), "cannot be compared, as plain diverged (", "4.2000", "-"),
        (
            (4.5, 4.4),
            (4.2, math.nan),
            "cannot be compared, as 1 of 2 runs of simreg diverged (",
            "1 of 2 runs of simreg diverged",
            "-",
        ),
    ],
)
def test_what_forbids_an_interval_is_said(
    first: tuple[float, ...], other: tuple[float, ...], verdict: str, loss: str, interval: str
) -> None:
    (section, *_) = own.page_of([arm("plain", first), arm("simreg", other)]).sections
    assert verdict in section.verdicts[0] and "nan" not in section.verdicts[0]
    row = section.grids[0].rows[1]
    assert (row[3], row[5]) == (loss, interval)
    if not math.isfinite(first[0]):
        assert section.grids[1].rows[0][1:3] == ["-", "-"], "nothing is reached"


def test_steps_are_compared_where_a_side_tells_no_tokens() -> None:
    """4.5 is reached at step 180 of 200."""
    told = {"seq_length": "256", "global_batch_size": "8"}
    pairs = ((told, {}), ({}, told), ({}, {}))
    saved = [own._saving(arm("b", (4.125,), **b), arm("a", (4.5,), **a), 4.5)[1:3] for a, b in pairs]
    assert saved == [["180", "10 % of the steps"]] * 3
    twice = told | {"global_batch_size": "16"}
    assert own._saving(arm("b", (4.125,), **twice), arm("a", (4.5,), **told), 4.5)[2] == "-80 %"


def test_time_is_saved_in_steps_whatever_their_tokens() -> None:
    """Steps of twice the tokens that take twice as long: 180 of them take 1.8 times as long as 200 of the others."""
    base, other = (
        Arm(
            name,
            (Run(name, {**arm(name, (end,)).curve.scalars, runs.ITERATION_TIME: curve(time)}, settings),),
            (Path(),),
        )
        for name, end, time, settings in (
            ("a", 4.5, 1.0, {"seq_length": "256", "global_batch_size": "8"}),
            ("b", 4.125, 2.0, {"seq_length": "256", "global_batch_size": "16"}),
        )
    )
    assert own._saving(other, base, 4.5)[-1] == "-80 %"


def test_seeds_are_averaged_where_all_of_them_have_a_value() -> None:
    one = Run("a", {"x": Series(np.array([1, 2, 3]), np.array([1.0, 2.0, 3.0])), "y": curve(1.0)})
    other = Run("a", {"x": Series(np.array([2, 3, 4]), np.array([4.0, 7.0, 9.0]))})
    mean = Arm("a", (one, other), (Path(), Path())).curve
    assert mean.name == "a, mean of 2" and list(mean.scalars) == ["x"]
    assert mean.scalars["x"].steps.tolist() == [2, 3] and mean.scalars["x"].values.tolist() == [3.0, 5.0]


@pytest.mark.parametrize(
    ("values", "loss", "step"),
    [
        ((6.0, 5.0, 4.0), 4.5, 250.0),
        ((6.0, 5.0, 4.0), 3.9, None),
        ((6.0, 5.0), 7.0, 100.0),
        ((6.0, 4.0, 5.0), 4.5, None),
        ((6.0, 4.0, 5.0, 4.0), 4.5, 350.0),
        ((6.0, float("nan"), 4.0), 4.5, 300.0),
        ((6.0, 4.0, float("nan")), 4.5, None),
    ],
)
def test_a_loss_is_reached_where_the_curve_stays_below_it(
    values: tuple[float, ...], loss: float, step: float | None
) -> None:
    assert own.step_at(Run("r", {runs.VALIDATION_LOSS: curve(*values)}), loss) == step


@pytest.mark.parametrize(
    "text",
    [
        "run,tag,step,value\na,lm loss validation,10,5\nb,validation_loss,10,4\na,lm loss validation,20,4.5\n",
        "run,step,lm loss validation\na,10,5\nb,10,4\na,20,4.5\n",
    ],
)
def test_csv_files_are_runs_in_both_shapes(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(text)
    a, b = read_arms([str(tmp_path / "mine.csv")])
    assert (a.name, b.name) == ("a", "b") and a.losses == [4.5] and b.losses == [4.0]
    named = read_arms([f"both={tmp_path / 'mine.csv'}"])
    assert [(arm.name, arm.losses) for arm in named] == [("both", [4.5, 4.0])]


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "tag,step,value\nlm loss,x,1\n", ""])
def test_other_csv_files_are_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(text)
    with pytest.raises(ReportError, match=r"mine\.csv"):
        read_arms([str(tmp_path / "mine.csv")])


def test_runs_whose_folders_have_one_name_stay_apart(tmp_path: Path) -> None:
    for parent in ("first", "second"):
        write_run(tmp_path / parent / "simreg", 5.0)
    arms = read_arms([str(tmp_path / parent / "simreg") for parent in ("first", "second")])
    assert [arm.name for arm in arms] == ["first/simreg", "second/simreg"]


def test_names_grow_until_they_tell_runs_apart(tmp_path: Path) -> None:
    for parent, loss in (("x", 5.0), ("y", 4.0)):
        write_run(tmp_path / parent / "out" / "run", loss)
    arms = read_arms([str(tmp_path / parent / "out" / "run") for parent in "xy"])
    assert [(arm.name, arm.losses) for arm in arms] == [("x/out/run", [5.0]), ("y/out/run", [4.0])]


def test_a_folder_with_an_equals_sign_is_found(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "lr=0.1", 5.0)
    assert [[arm.name for arm in read_arms([word])] for word in (str(folder), f"a={folder}")] == [["lr=0.1"], ["a"]]


def test_a_run_counts_once_as_a_seed(tmp_path: Path) -> None:
    one, copy = write_run(tmp_path / "one", 5.0, 4.5), write_run(tmp_path / "copy", 5.0, 4.5)
    with pytest.raises(ReportError, match="is given 2 times, and counts once"):
        read_arms([f"a={one}", f"b={one}/../one"])
    with pytest.raises(ReportError, match="hold the same run, which counts once as a seed of a"):
        read_arms([f"a={one}", f"a={copy}"])
    assert len(read_arms([f"a={one}", f"b={copy}"])) == 2, "two names are two arms, alike or not"


def test_what_makes_a_pair_unfair_is_said() -> None:
    here, there = {"data_path": "['c4']", "lr": "1"}, {"data_path": "['wiki']", "lr": "2"}
    longer = Run("b", {runs.VALIDATION_LOSS: curve(6.0, 5.0, 4.0)}, there)
    verdict = own._verdict(Arm("b", (longer,), (Path(),)), arm("a", (4.5,), **here))
    assert verdict.endswith(
        " But b was read at step 300, and a at step 200. But their text is not the same by data_path."
    )
    assert "But" not in own._verdict(arm("b", (4.4,), **here), arm("a", (4.5,), **here))
    assert "text" not in own._verdict(arm("b", (4.4,), **here), arm("a", (4.5,))), "a table has no settings"


def test_a_report_replaces_reports_alone(pair, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# mine\n")
    done = report("--output", tmp_path / "README.html", *pair)
    assert done.exit_code == 2 and "README.md is there and no report of this program" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"] and (tmp_path / "README.md").stat().st_size == 7
    for name in ("x.md", "x", "."):
        done = report("--output", tmp_path / name, *pair)
        assert done.exit_code == 2 and "names no HTML file: give --output a name that ends with .html" in done.stderr
    for _ in range(2):
        assert report("--output", tmp_path / "x.html", *pair).exit_code == 0


def test_a_page_is_the_old_one_where_the_disk_is_full(pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert report("--output", tmp_path / "x.html", *pair).exit_code == 0
    before = (tmp_path / "x.html").read_text()

    def full(self: Path, text: str, **_: object) -> None:
        self.write_bytes(text[:100].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    done = report("--output", tmp_path / "x.html", *pair)
    assert done.exit_code == 2 and "cannot be written (No space left on device)" in done.stderr
    assert (tmp_path / "x.html").read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x-pictures", "x.html", "x.md"]


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"packages": 1, "git": "", "python": ""}'])
def test_a_damaged_record_costs_no_report(text: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 5.0)
    (path,) = folder.glob("record/*/versions.json")
    path.write_text(text)
    command = path.with_name("command.txt")
    command.unlink()
    command.mkdir()
    (version, *_) = own.page_of(read_arms([str(folder)])).versions
    assert version == f"run: {path} cannot be read"


@pytest.mark.parametrize("name", ["$\\frac$", "_x", "a_b"])
def test_any_name_is_drawn(name: str) -> None:
    figure = own.draw_curves([Run(name, {runs.VALIDATION_LOSS: curve(5.0, 4.0)})], None)
    figure.savefig(io.BytesIO(), format="svg")
    (shown,) = [text.get_text() for text in figure.legends[0].get_texts()]
    assert shown.strip().replace("\\$", "$") == name


def test_an_evaluation_before_the_first_step_is_no_saving() -> None:
    start = Arm("a", (Run("a", {runs.VALIDATION_LOSS: Series(np.array([0]), np.array([9.0]))}),), (Path(),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert own._saving(start, start, 9.0)[1:3] == ["0", "-"]
        start.runs[0].scalars[runs.ITERATION_TIME] = Series(np.array([1]), np.array([0.0]))
        assert own._saving(start, start, 9.0)[4] == "not logged", "a step that took no time"


def test_what_is_no_run_is_one_sentence(tmp_path: Path) -> None:
    done = report(tmp_path / "nowhere", "--output", tmp_path / "x.html")
    assert done.exit_code == 2 and "is not a folder" in done.output
    assert report("check", tmp_path).exit_code == 2, "the other commands are reached by their names"


def test_text_of_a_user_is_escaped() -> None:
    section = Section("a<b", "<script>", verdicts=["x | y"], grids=[Grid(("a|b",), [("<i>",)])], commands=["a && b"])
    page = Page("t&t", [section], ["v"])
    assert "<script>" not in as_html(page) and "&lt;i&gt;" in as_html(page) and "a &amp;&amp; b" in as_html(page)
    assert r"a\|b" in as_markdown(page, "p")
    section = Section(
        "a", "# a heading\n- and <b>bold</b>", verdicts=["1. first\n\nsecond"], grids=[Grid(("a\nb",), [])]
    )
    lines = as_markdown(Page("t", [section], ["v"]), "p").splitlines()
    assert r"\# a heading - and \<b>bold\</b>" in lines and r"- 1\. first second" in lines and "| a b |" in lines


def test_seeds_that_are_none_are_told() -> None:
    def arm(name: str, *ends: int, **settings: str) -> Arm:
        made = [
            Run(name, {runs.VALIDATION_LOSS: curve(*([4.0 + number / 100] * (end // 100)))}, {"seed": str(number)})
            for number, end in enumerate(ends)
        ]
        made[0].settings.update(settings)
        return Arm(name, tuple(made), tuple(Path(name) for _ in ends))

    page = own.page_of([arm("ce", 400, 400), arm("sr", 400, 100, lr="1")])
    (verdict,) = page.sections[0].verdicts
    assert "But the runs of sr end at steps 100 and 400. But the runs of sr differ by lr." in verdict
    assert "runs of ce" not in verdict and page.sections[0].grids[0].rows[1][2] == "100 and 400"


def test_an_unnamed_run_is_no_seed_of_a_named_one(tmp_path: Path) -> None:
    for name in ("ce", "baseline"):
        (tmp_path / f"{name}.csv").write_text("tag,step,value\nlm loss validation,1,4\n")
    with pytest.raises(ReportError, match=r"baseline\.csv has no name here and would be called baseline"):
        read_arms([f"baseline={tmp_path / 'ce.csv'}", str(tmp_path / "baseline.csv")])


def test_a_validation_loss_is_drawn_as_it_is_and_short_runs_are_seen() -> None:
    """A running mean lags behind, the more the more often a run was validated."""
    falling = Series(np.arange(1, 401) * 10, np.linspace(6.0, 3.0, 400))
    tags = (runs.VALIDATION_LOSS, runs.TRAIN_LOSS)
    long, short = (Run(name, dict.fromkeys(tags, part)) for name, part in (
        ("long", falling), ("short", Series(falling.steps[:10], falling.values[:10] + 2)),
    ))  # fmt: skip
    figure = draw_curves([long, short], None)
    validation, training = figure.axes[:2]
    assert {text.get_text() for text in validation.texts} >= {"3.000"}
    assert training.get_ylim()[1] > 7.9, "the short one's values"


def test_states_that_are_no_numbers_are_not_isotropic() -> None:
    assert np.isnan(cosine_matrix(np.full((2, 3), np.nan, dtype=np.float32))).all()
    assert cosine_matrix(np.zeros((2, 3), dtype=np.float32)).tolist() == [[0.0, 0.0], [0.0, 0.0]]
