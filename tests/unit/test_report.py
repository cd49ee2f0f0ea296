# SPDX-License-Identifier: Apache-2.0
"""Reading runs back, and what the figures and the table made of them hold."""

import io
import math
import shutil

import numpy as np
import pytest
from rich.console import Console
from torch.utils.tensorboard import SummaryWriter

from simreg_megatron import report
from simreg_megatron.report import curves, heatmap, runs, welch
from simreg_megatron.report.runs import Run, Series
from simreg_megatron.report.steps import Overhead
from simreg_megatron.report.table import Summary
from simreg_megatron.reproduce import figures
from simreg_megatron.reproduce.check import Table, read_tables
from simreg_megatron.reproduce.page import _means, page_of
from simreg_megatron.reproduce.plan_file import plan_of
from simreg_megatron.reproduce.shipped import RESULTS

PNG = b"\x89PNG\r\n\x1a\n"


def series(values, every=1):
    return Series(np.arange(1, len(values) + 1) * every, np.array(values, dtype=np.float64))


def make_run(name, *, validation=(5.0, 4.5, 4.25), simreg=(2.0, 1.0, 0.5), train=None):
    train = train if train is not None else 4 + 4 * np.exp(-np.arange(150) / 20)
    return Run(
        name,
        {
            runs.VALIDATION_LOSS: series(validation, every=50),
            runs.TRAIN_LOSS: series(train),
            runs.SIMREG_LOSS: series(simreg, every=50),
            runs.NEGATIVE_COSINE: series([0.5, 0.2, 0.1], every=50),
            runs.ITERATION_TIME: series([9.0, 0.5, 0.7], every=50),
        },
    )


# ---- reading -------------------------------------------------------------------------------------------------------


def test_events_are_read_back(tmp_path):
    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(1, 1502):  # beyond the number of points that TensorBoard keeps by default
            writer.add_scalar("lm loss", 10 / step, step)
        writer.add_scalar("lm loss validation", 4.5, 100)
    run = report.read_run(tmp_path, name="a run")
    steps, values = run.scalars["lm loss"]
    assert run.name == "a run"
    assert steps.tolist() == list(range(1, 1502))
    np.testing.assert_allclose(values, 10 / steps, rtol=1e-6)
    assert run.last("lm loss validation") == 4.5
    assert run.last("simreg loss") is None


def test_a_step_written_twice_counts_once_with_its_later_value(tmp_path):
    """A run that was stopped at step 30 and resumed from step 10 writes another file over the same steps."""
    for values in ({10: 1.0, 20: 2.0, 30: 3.0}, {20: 5.0, 25: 6.0}):
        with SummaryWriter(str(tmp_path), filename_suffix=f".{len(values)}") as writer:
            for step, value in values.items():
                writer.add_scalar("lm loss", value, step)
    steps, values = report.read_run(tmp_path).scalars["lm loss"]
    assert steps.tolist() == [10, 20, 25], "30 is of the branch that ended"
    assert values.tolist() == [1.0, 5.0, 6.0]


def test_a_validation_of_the_branch_that_ended_is_not_the_runs(tmp_path):
    """Killed at 390, resumed from 300, now at 320: nothing was validated since, and the validation at 350 is gone."""
    with SummaryWriter(str(tmp_path)) as writer:
        for time, step in enumerate([*range(10, 391, 10), 310, 320]):
            writer.add_scalar("lm loss", 5.0, step, walltime=float(time))
            writer.add_scalar("lm loss vs samples", 5.0, 8 * step, walltime=float(time))
            if step in (250, 350):
                writer.add_scalar("lm loss validation", step / 100, step, walltime=float(time))
    run = report.read_run(tmp_path)
    assert run.scalars["lm loss"].steps[-1] == 320 and run.scalars["lm loss vs samples"].steps[-1] == 2560
    assert run.scalars["lm loss validation"].steps.tolist() == [250]


def test_a_folder_without_events_is_one_sentence(tmp_path):
    with pytest.raises(report.ReportError, match="holds no TensorBoard scalars"):
        report.read_run(tmp_path)
    with pytest.raises(report.ReportError, match="is not a folder"):
        report.read_run(tmp_path / "nowhere")


def test_the_end_of_a_run_is_its_last_tenth():
    run = Run("r", {"x": series([0.0] * 90 + [2.0] * 5 + [4.0] * 5)})
    assert run.mean_of_end("x") == 3.0
    assert run.mean_of_end("x", fraction=0.05) == 4.0
    assert Run("r", {"x": series([7.0])}).mean_of_end("x") == 7.0


def test_the_settings_that_megatron_wrote_are_read_back_and_tell_the_tokens_of_a_step(tmp_path):
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("lm loss", 5.0, 1)
        for name, value in (("seq_length", 256), ("global_batch_size", 8), ("rampup_batch_size", None)):
            writer.add_text(name, str(value), 0)
    run = report.read_run(tmp_path)
    assert run.settings == {"seq_length": "256", "global_batch_size": "8", "rampup_batch_size": "None"}
    assert run.tokens_per_step == 2048
    assert Run("r", settings=run.settings | {"rampup_batch_size": "[4, 4, 100]"}).tokens_per_step is None
    assert Run("r").tokens_per_step is None


# ---- curves --------------------------------------------------------------------------------------------------------


def test_curves_hold_every_runs_data(tmp_path):
    several = [make_run("cross-entropy"), make_run("simreg", validation=(5.0, 4.4, 4.1))]
    figure = report.draw_curves(several, tmp_path / "curves.png")
    saved = (tmp_path / "curves.png").read_bytes()
    assert saved.startswith(PNG) and len(saved) > 20_000
    assert len(figure.axes) == len(curves.PANELS)
    for axes, panel in zip(figure.axes, curves.PANELS, strict=True):
        drawn = [line for line in axes.lines if line.get_gid() == "raw"]
        assert len(drawn) == 2
        for line, run in zip(drawn, several, strict=True):
            np.testing.assert_array_equal(line.get_xdata(), run.scalars[panel.tag].steps)
            np.testing.assert_array_equal(line.get_ydata(), run.scalars[panel.tag].values)
        assert axes.get_xlabel() == "training step" and axes.get_ylabel() == panel.label
        assert panel.lower_is_better == ("lower is better" in panel.label)
        assert axes.get_yscale() == ("log" if panel.tag == runs.SIMREG_LOSS else "linear")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["cross-entropy", "simreg"]


def test_each_line_says_where_it_ended_and_none_covers_another(tmp_path):
    several = [make_run("a"), make_run("b", validation=(5.0, 4.5, 4.2501)), make_run("c", validation=(5.0, 4.5, 4.75))]
    figure = report.draw_curves(several, tmp_path / "curves.png")
    ends = [text for text in figure.axes[0].texts if text.get_gid() == "end"]
    assert [text.get_text() for text in ends] == ["4.250", "4.250", "4.750"]
    assert [text.get_color() for text in ends] == [line.get_color() for line in figure.axes[0].lines]
    boxes = [text.get_window_extent() for text in ends]
    assert not any(one.overlaps(other) for index, one in enumerate(boxes) for other in boxes[:index])


@pytest.mark.parametrize(
    ("heights", "shown"),
    [
        ([0.0, 50.0], [0.0, 50.0]),
        ([20.0, 20.0], [15.0, 25.0]),
        ([21.0, 20.0, 19.0, 60.0], [30.0, 20.0, 10.0, 60.0]),
        ([0.0, 8.0, 16.0], [-2.0, 8.0, 18.0]),
        ([], []),
    ],
)
def test_labels_are_moved_apart_as_little_as_it_takes(heights, shown):
    assert curves.spread(heights, 10.0) == pytest.approx(shown)


def test_labels_stay_above_the_axis():
    assert curves.spread([1.0, 0.0, 40.0], 10.0, 5.0) == pytest.approx([15.0, 5.0, 40.0])


def test_tokens_stand_below_the_steps_where_all_runs_agree(tmp_path):
    sizes = {"seq_length": "256", "global_batch_size": "8"}
    told = [Run(name, make_run(name).scalars, sizes) for name in "ab"]
    axes = report.draw_curves(told, tmp_path / "c.png").axes[0]
    assert "tokens" in axes.get_xlabel() and axes.xaxis.get_major_formatter()(400, None) == "400\n819 k"
    odd = [told[0], Run("b", told[1].scalars, sizes | {"global_batch_size": "16"})]
    assert "tokens" not in report.draw_curves(odd, tmp_path / "c.png").axes[0].get_xlabel()
    assert [curves.short_count(number) for number in (0, 512, 999_600, 1.05e6, 5.2e10)] == [
        "0",
        "512",
        "1 M",
        "1.05 M",
        "52 B",
    ]


def test_margins_and_cosines_are_drawn_where_they_were_logged():
    plain, more = make_run("a"), make_run("b")
    more.scalars["simreg margin mean"] = series([0.1, 0.2])
    more.scalars[runs.POSITIVE_COSINE] = series([0.5, 0.9])
    assert curves.panels_of([plain]) == curves.PANELS
    assert [panel.tag for panel in curves.panels_of([plain, more])[len(curves.PANELS) :]] == [
        runs.POSITIVE_COSINE, "simreg margin mean"
    ]  # fmt: skip
    assert curves.panels_of([more])[-1].label == "nats"


def test_runs_differ_in_more_than_colour(tmp_path):
    figure = report.draw_curves([make_run("a"), make_run("b")], tmp_path / "c.png")
    first, second = figure.axes[0].lines
    assert first.get_color() != second.get_color()
    assert first.get_linestyle() != second.get_linestyle()
    assert first.get_marker() != second.get_marker()


def test_a_missing_scalar_is_said_in_its_panel(tmp_path):
    figure = report.draw_curves([Run("bare", {runs.TRAIN_LOSS: series([3.0, 2.0])})], tmp_path / "c.png")
    said = [text.get_text() for axes in figure.axes for text in axes.texts if text.get_gid() != "end"]
    assert len(said) == 3 and all("was not logged" in text for text in said)


def test_values_that_cannot_be_drawn_do_not_end_the_figure(tmp_path):
    run = make_run("diverged", simreg=(1.0, 0.0, math.nan), train=[8.0, math.nan, math.inf] * 50)
    report.draw_curves([run], tmp_path / "c.png")
    assert (tmp_path / "c.png").stat().st_size > 10_000


def test_running_mean_looks_back_only():
    mean = curves.running_mean(np.array([1.0, 3.0, 5.0, 100.0]), 2)
    np.testing.assert_allclose(mean, [1.0, 2.0, 4.0, 52.5])


def test_one_missing_value_leaves_the_curve_after_it():
    mean = curves.running_mean(np.array([1.0, math.nan, 5.0, math.inf, math.nan, 3.0]), 2)
    np.testing.assert_allclose(mean, [1.0, 1.0, 5.0, 5.0, math.nan, 3.0])


def test_values_without_scatter_decide_for_nothing():
    assert welch.welch([4.5, 4.5], [4.5, 4.5]).p_value == 1.0
    assert welch.welch([4.4, 4.4], [4.5, 4.5]).p_value == 1.0
    assert welch.welch([4.4, 4.41], [4.5, 4.5]).p_value < 0.1


# ---- experiments ---------------------------------------------------------------------------------------------------


def test_a_table_that_cannot_be_read_has_no_figures():
    row = {"arm": "a", "size": "64", "tokens_per_parameter": "20", "seed": "1", "validation_loss": "4.5", "run": "r"}
    points = tuple({"run": "r", "tag": "train_loss", "step": str(step), "value": "4.5"} for step in (10, 20))
    plan = plan_of({"name": "mine", "question": "?", "arms": {"a": {}}}, where="mine")
    assert [picture.name for picture in figures.pictures(Table(plan, (row,), points))] == ["ends", "curves"]
    no_rows, cut, no_number = (), (row, row | {"arm": None, "run": None}), (row | {"validation_loss": "4.e"},)
    for rows in (no_rows, cut, no_number):
        assert figures.pictures(Table(plan, rows, points)) == []
    assert (
        figures.pictures(Table(plan, (row,), ({"run": "r", "tag": "train_loss", "step": "1", "value": "4.e"},))) == []
    )


@pytest.mark.parametrize("letters", [0, 60])
def test_the_page_of_a_table_that_was_cut_is_one_sentence(tmp_path, letters):
    """Of the header alone, and of a line that ends in the middle."""
    for path in RESULTS.glob("tuning*"):
        shutil.copy(path, tmp_path)
    head, _, rows = (RESULTS / "tuning.csv").read_text().partition("\n")
    (tmp_path / "tuning.csv").write_text(f"{head}\n{rows[:letters]}")
    (section,) = page_of(read_tables(tmp_path)).sections
    assert not section.pictures and not section.grids and not section.commands
    told = "are not what `simreg-megatron reproduce` writes" if letters else "its table has no runs: copy it again"
    assert told in section.refused[0]


def test_the_table_of_means_has_the_spread_over_the_seeds():
    rows = [
        {"arm": "a", "size": "64", "tokens_per_parameter": "20", "seed": seed, "steps": "9", "validation_loss": loss,
         "bits_per_byte": "", "seconds_per_step": "0.5" if seed == "1" else ""}
        for seed, loss in (("1", "4.5"), ("2", "4.6"), ("3", "4.7"))
    ]  # fmt: skip
    plan = plan_of({"name": "mine", "question": "?", "arms": {"a": {}}}, where="mine")
    grid = _means(Table(plan, tuple(rows), ()))
    assert grid.rows == [("a", "64", "20", "3", "9", "4.6 (0.1)", "-", "0.5")]
    assert grid.heads[-3:] == ("validation loss (nats per token)", "bits per byte", "seconds per step")


# ---- heat-maps -----------------------------------------------------------------------------------------------------


def states(name="model", count=6, width=4, seed=0, labels=None):
    hidden = np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)
    labels = np.arange(count) if labels is None else np.array(labels)
    return report.HiddenStates(name, hidden, tuple(f"t{index}" for index in range(count)), labels)


def cosines_by_hand(each, wanted):
    pairs = [
        float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
        for i, a in enumerate(each.hidden)
        for j, b in enumerate(each.hidden)
        if i != j and wanted(each.labels[i], each.labels[j])
    ]
    return sum(pairs) / len(pairs)


def test_heatmaps_share_one_scale_and_state_the_means_of_equal_and_of_other_labels(tmp_path):
    labels = [7, 8, 7, 9, 7, 8]
    several = [states("before", seed=1, labels=labels), states("after", seed=2, labels=labels)]
    figure = report.draw_heatmaps(several, tmp_path / "maps.png")
    assert (tmp_path / "maps.png").read_bytes().startswith(PNG)
    for axes, each in zip(figure.axes, several, strict=False):
        (image,) = axes.images
        assert image.get_clim() == (-1, 1)
        same, other = (cosines_by_hand(each, wanted) for wanted in (np.equal, np.not_equal))
        assert f"same {same:+.3f}, other {other:+.3f}" in axes.get_title()
        assert report.mean_cosines(each).both == pytest.approx(cosines_by_hand(each, lambda *_: True))
        (frames,) = axes.collections
        assert sorted(map(tuple, frames.get_offsets().tolist())) == [
            (0, 2),
            (0, 4),
            (1, 5),
            (2, 0),
            (2, 4),
            (4, 0),
            (4, 2),
            (5, 1),
        ]
        assert [tick.get_text() for tick in axes.get_xticklabels()] == ["t1", "t2", "t3", "t4", "t5", "id 8"]
    assert figure.axes[0].get_yticklabels()[0].get_text() == "t0 -> t1"


def test_maps_may_stand_in_rows(tmp_path):
    figure = report.draw_heatmaps([states(str(seed), seed=seed) for seed in range(3)], tmp_path / "m.png", columns=2)
    assert [bool(axes.images) for axes in figure.axes] == [True, True, True, False]


def test_a_zero_row_has_cosine_zero():
    cosine = heatmap.cosine_matrix(np.array([[3.0, 0.0], [0.0, 0.0], [1.0, 1.0]], dtype=np.float32))
    half = 2**-0.5
    np.testing.assert_allclose(cosine, [[1, 0, half], [0, 0, 0], [half, 0, 1]], atol=1e-12)


def test_the_part_that_is_drawn_has_no_runs_of_blanks_and_most_equal_labels():
    tokens = ["a", "b"] + [" "] * 10 + ["c", "d", "e", "d", "e", "f", "g", "h"]
    ids = {token: number for number, token in enumerate(sorted(set(tokens)))}
    labels = np.array([ids[token] for token in (*tokens[1:], "a")])
    hidden = np.random.default_rng(0).standard_normal((len(tokens), 3)).astype(np.float32)
    part = report.excerpt(report.HiddenStates("m", hidden, tuple(tokens), labels), length=5)
    assert part.tokens == (" ", "c", "d", "e", "d") and part.next_tokens == ("c", "d", "e", "d", "e")
    np.testing.assert_array_equal(part.hidden, hidden[11:16])
    np.testing.assert_array_equal(part.labels, labels[11:16])
    short = states(count=4)
    assert report.excerpt(short, length=4) is short
    assert [heatmap.is_blank(token) for token in ("", " ", "\\n", "\u2581\u2581", "_", "n", "\u2581a")] == [
        True, True, True, True, False, False, False
    ]  # fmt: skip


def test_tokens_of_any_text_can_be_drawn(tmp_path):
    tokens = ("\u2581the", "$", "x_1$", "\n", "", "a" * 50)
    each = report.HiddenStates("odd", states().hidden, tokens, np.arange(6))
    figure = report.draw_heatmaps([each], tmp_path / "maps.png")
    labels = [tick.get_text().partition(" -> ")[0] for tick in figure.axes[0].get_yticklabels()]
    assert labels == ["the", r"\$", r"x_1\$", "?", heatmap.BLANK, "a" * 10 + "~"]


def test_hidden_states_are_read_back(tmp_path):
    each = states()
    np.savez(tmp_path / "h.npz", hidden=each.hidden, tokens=np.array(each.tokens), labels=np.arange(6))
    found = report.read_hidden_states(tmp_path / "h.npz", name="n")
    np.testing.assert_array_equal(found.hidden, each.hidden)
    np.testing.assert_array_equal(found.labels, np.arange(6))
    assert found.tokens == each.tokens
    np.savez(tmp_path / "ids.npz", hidden=each.hidden, tokens=np.arange(6), labels=np.arange(6))
    assert report.read_hidden_states(tmp_path / "ids.npz", name="n").tokens == tuple("012345")


def test_a_pickle_in_the_file_is_refused(tmp_path):
    odd = np.array([object(), object()])
    np.savez(tmp_path / "bad.npz", hidden=np.zeros((2, 2)), tokens=odd, labels=np.arange(2))
    with pytest.raises(report.ReportError, match="does not hold"):
        report.read_hidden_states(tmp_path / "bad.npz", name="n")


def test_missing_or_unfit_hidden_states_are_one_sentence(tmp_path):
    with pytest.raises(report.ReportError, match="is not there"):
        report.read_hidden_states(tmp_path / "none.npz", name="n")
    np.savez(tmp_path / "other.npz", hidden=np.zeros((2, 2)))
    with pytest.raises(report.ReportError, match="does not hold"):
        report.read_hidden_states(tmp_path / "other.npz", name="n")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "other.npz").read_bytes()[:40])
    with pytest.raises(report.ReportError, match="does not hold"):
        report.read_hidden_states(tmp_path / "cut.npz", name="n")
    with pytest.raises(report.ReportError, match="6 hidden states but 2 tokens"):
        report.HiddenStates("n", states().hidden, ("a", "b"), np.arange(6))


# ---- table ---------------------------------------------------------------------------------------------------------


def rendered(table):
    console = Console(width=160, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


CLEAR = Overhead(base=0.4, other=0.41, percent=2.5, low=1.5, high=3.25)


def test_the_table_holds_the_numbers_and_their_differences():
    several = [make_run("cross-entropy"), make_run("simreg", validation=(5.0, 4.4, 4.15), simreg=(2.0, 1.0, 0.125))]
    first, second = (report.summarize(run) for run in several)
    assert first == Summary("cross-entropy", 4.25, 0.5, pytest.approx(0.1))
    rows = rendered(report.summary_table(first, second, steps=CLEAR)).splitlines()
    (difference,) = [row for row in rows if "difference" in row]
    assert "-0.1000" in difference and "-0.375" in difference and "+2.5 % (+-0.9)" in difference
    assert any("4.2500" in row and "0.5" in row and "0.400" in row for row in rows)
    assert any("4.1500" in row and "0.410" in row for row in rows)


def test_the_table_fits_eighty_columns():
    worst = [Summary("cross-entropy", *[value] * 3) for value in (-12345.6789, -1.2345e-05)]
    wide = Overhead(base=123.456, other=123.456, percent=-100.0, low=-99.0, high=99.0)
    for rows in (worst, [Summary("cross-entropy", None, None, None)] * 2):
        lines = rendered(report.summary_table(*rows, steps=wide)).splitlines()
        assert max(map(len, lines)) <= 80 and not any("..." in line or "\u2026" in line for line in lines)


def test_what_was_not_logged_is_said():
    bare = report.summarize(Run("bare", {}))
    assert rendered(report.summary_table(bare, bare, steps=CLEAR)).count("not logged") == 9


def test_a_spread_larger_than_the_difference_is_said():
    assert report.describe_steps(CLEAR).endswith("SimReg 0.410: +2.5 %, 95 % interval +1.5 to +3.2 %.")
    said = report.describe_steps(CLEAR._replace(low=-1.0, high=6.0))
    assert "cannot be told apart" in said and "-1.0 to +6.0" in said


def test_the_overhead_is_a_ratio_within_each_turn():
    """The machine was twice as slow in the second turn; means over all intervals would say something else."""
    found = report.overhead([[100.0, 102.0, 98.0], [200.0]], [[110.0, 108.0, 112.0], [220.0, 216.0, 224.0, 220.0]])
    assert found.percent == pytest.approx(10.0) and found.low < 10.0 < found.high and found.is_clear
    assert (found.base, found.other) == (101.0, 216.0), "times are over all intervals, the ratio is not theirs"
    again = report.overhead([[100.0, 102.0, 98.0], [200.0]], [[110.0, 108.0, 112.0], [220.0, 216.0, 224.0, 220.0]])
    assert found == again
    same = report.overhead([[100.0, 140.0, 60.0]] * 4, [[101.0, 61.0, 141.0]] * 4)
    assert not same.is_clear and same.low < 0 < same.high
    for bad in ([[1.0]], [[1.0], []]):
        with pytest.raises(ValueError, match="in every turn"):
            report.overhead([[1.0], [1.0]], bad)


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (4.15, "simreg ended 0.100 nats per token better than ce"),
        (4.35, "simreg ended 0.100 nats per token worse than ce"),
        (4.2504, "No difference"),
        (math.nan, "cannot be compared"),
        (None, "cannot be compared"),
    ],
)
def test_the_sentence_says_what_was_measured(after, words):
    first, other = (Summary(name, loss, None, None) for name, loss in (("ce", 4.25), ("simreg", after)))
    assert words in report.compare_validation(first, other)
