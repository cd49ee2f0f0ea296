# SPDX-License-Identifier: Apache-2.0
"""Runs read back from TensorBoard, their figure and table, and heat-maps of hidden states."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from examples import heatmap
from examples.heatmap import HiddenStates
from simreg_megatron import cli
from simreg_megatron.tools.curves import read_run

Captured = pytest.CaptureFixture[str]


def write(folder: Path, *, losses: dict[int, float]) -> Path:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard")) as writer:
        for step, loss in losses.items():
            writer.add_scalar("lm loss", 10 / step, step)
            writer.add_scalar("lm loss validation", loss, step)
    return folder


def test_events_are_read_back(tmp_path: Path) -> None:
    run = read_run(write(tmp_path / "a", losses={step: 1.0 for step in range(1, 1502)}))  # more than TensorBoard keeps
    steps, values = run.scalars["lm loss"]
    assert run.name == "a" and steps.tolist() == list(range(1, 1502))
    np.testing.assert_allclose(values, 10 / steps, rtol=1e-6)
    assert run.last("lm loss validation") == 1.0 and run.last("simreg loss") is run.mean_of_end("simreg loss") is None


def test_what_a_resumed_run_logged_before_is_dropped(tmp_path: Path) -> None:
    """Killed at 390, resumed from 300, now at 320: nothing was validated since, and the validation at 350 is gone."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for time, step in enumerate([*range(10, 391, 10), 310, 320]):
            writer.add_scalar("lm loss", 5.0 + time, step, walltime=float(time))
            writer.add_scalar("lm loss vs samples", 5.0, 8 * step, walltime=float(time))
            if step in (250, 350):
                writer.add_scalar("lm loss validation", step / 100, step, walltime=float(time))
    run = read_run(tmp_path)
    assert run.scalars["lm loss"].steps[-2:].tolist() == [310, 320] and run.last("lm loss") == 5.0 + 40
    assert run.scalars["lm loss validation"].steps.tolist() == [250] and run.last("lm loss validation") == 2.5


def test_the_loss_of_a_test_set_is_left_out(tmp_path: Path) -> None:
    """Megatron logs it last, under the tag and step of the validation loss."""
    from torch.utils.tensorboard import SummaryWriter

    for split, last in (("98,1,1", 3.0), ("99,1,0", 2.0)):
        with SummaryWriter(str(tmp_path / split)) as writer:
            for loss in (4.0, 3.0, 2.0):  # while it trains, at its end, of the test set
                writer.add_scalar("lm loss validation", loss, 20)
            writer.add_text("data_path", "['text']", 0)
            writer.add_text("split", split, 0)
        assert read_run(tmp_path / split).last("lm loss validation") == last


def test_a_folder_without_events_is_one_sentence(tmp_path: Path, capsys: Captured) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert cli.main(["curves", str(folder)]) == 2
        assert f"{folder} holds no TensorBoard scalars: give a run's" in capsys.readouterr().err


def test_the_command_draws_and_compares(tmp_path: Path, capsys: Captured) -> None:
    one = write(tmp_path / "lr=0.1" / "one", losses={1: 5.0, 2: 4.5})
    two = write(tmp_path / "two", losses={1: 5.0, 2: 4.25})
    figure = tmp_path / "figure.png"
    assert cli.main(["curves", str(one), f"lower={two}", "--output", str(figure)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1].split() == ["one", "2", "4.5000"] and said[2].split() == ["lower", "2", "4.2500", "-0.2500"]
    assert figure.read_bytes().startswith(b"\x89PNG") and figure.stat().st_size > 20_000
    assert cli.main(["curves", str(two), "--output", "curves.xyz"]) == 2
    assert "--output curves.xyz: Format 'xyz' is not supported" in capsys.readouterr().err
    assert cli.main(["curves", str(two), str(two)]) == 2
    assert "have one name (two, two): give" in capsys.readouterr().err


# Heat-maps ------------------------------------------------------------------------------------------------------------


def test_mean_cosines_by_hand() -> None:
    hidden = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 2.0]], dtype=np.float32)
    states = HiddenStates("m", hidden, ("a", "b", "c"), np.array([7, 7, 8]))
    same = other = np.sqrt(0.5)
    found = heatmap.mean_cosines(states)
    assert found == pytest.approx((same, other / 2, (same + other) / 3), abs=1e-12)
    assert np.isnan(heatmap.mean_cosines(HiddenStates("m", hidden, ("a", "b", "c"), np.array([1, 2, 3]))).same)
