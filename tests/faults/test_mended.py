# SPDX-License-Identifier: Apache-2.0
"""Regression tests for what the campaigns found, each of which fails without its fix."""

import argparse
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from launch import checkpoints, launcher
from launch.flags import LaunchError, flag_names
from launch.planned import resumed
from simreg_megatron.config.flags import add_simreg_arguments
from simreg_megatron.cpu import stand_ins
from simreg_megatron.plugin import compat, installation, loop
from simreg_megatron.plugin.refusals import refuse_start_over


def test_reading_data_on_the_cpu_draws_no_random_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on begins to read after its random state was loaded, one that never stopped long before."""
    from torch.utils.data import DataLoader

    def moves() -> bool:
        before = torch.get_rng_state()
        iter(DataLoader([0, 1]))
        return not torch.equal(before, torch.get_rng_state())

    assert moves(), "else there would be nothing to fix"
    monkeypatch.setattr(DataLoader, "__init__", DataLoader.__init__)
    stand_ins._give_loaders_a_generator(torch)
    assert not moves()


@pytest.fixture
def untracked(tmp_path: Path) -> Path:
    """A complete checkpoint, and no file that names it: the run was killed between the two."""
    folder = tmp_path / "checkpoints"
    checkpoint = checkpoints.path_of(folder, 6)
    checkpoint.mkdir(parents=True)
    (checkpoint / ".metadata").write_bytes(b"x")
    (checkpoint / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return folder


class TestNoStartAtStep0:
    def test_our_launcher_refuses_it(self, untracked: Path) -> None:
        plan = SimpleNamespace(flags=[("--save", str(untracked))])
        with pytest.raises(LaunchError, match="--auto-resume"):
            launcher._refuse_to_overwrite(plan)
        (checkpoints.path_of(untracked, 6) / "metadata.json").unlink()
        launcher._refuse_to_overwrite(plan)  # a torn one is nothing to go on from

    def test_the_plugin_refuses_it_in_other_scripts(self, untracked: Path) -> None:
        args = SimpleNamespace(load=str(untracked), ckpt_step=None)
        with pytest.raises(ValueError, match="holds iter_0000006 and no latest_checkpointed_iter"):
            refuse_start_over(args)
        refuse_start_over(SimpleNamespace(load=str(untracked), ckpt_step=6))
        refuse_start_over(SimpleNamespace(load=None))
        (untracked / checkpoints.TRACKER).write_text("6")
        refuse_start_over(args)

    @pytest.mark.parametrize("flags", [("--simreg-lambda", "1"), ("--adagc",)])
    def test_the_plugin_refuses_it_before_a_model_is_built(self, flags, untracked: Path, monkeypatch) -> None:
        args = add_simreg_arguments(argparse.ArgumentParser()).parse_args(flags)
        vars(args).update(load=str(untracked), log_interval=1, clip_grad=1.0)
        monkeypatch.setattr(compat, "arguments", lambda: args)
        monkeypatch.setattr(installation, "_installation", installation.Installation(None, lambda config: ()))
        with pytest.raises(ValueError, match="holds iter_0000006 and no latest_checkpointed_iter"):
            loop.set_up(lambda: pytest.fail("a model was built"))

    def test_a_run_that_goes_on_does_so_or_not_at_all(self) -> None:
        from tests.unit.test_launcher import plan

        later = resumed(plan("--auto-resume", "--save-interval", "5", "--output", "out"))
        assert "--exit-on-missing-checkpoint" in flag_names(later.flags)
        assert len([flag for flag in resumed(later).flags if flag == ("--exit-on-missing-checkpoint",)]) == 1
