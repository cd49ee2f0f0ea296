# SPDX-License-Identifier: Apache-2.0
"""What goes wrong with --verify is told in a sentence, and before the export where that can be."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from simreg_megatron.checkpoint import verify
from simreg_megatron.checkpoint.errors import CheckpointError
from simreg_megatron.checkpoint.source import TRACKER
from simreg_megatron.cli import app
from tests.helpers.checkpoints import dist_checkpoint

pytest.importorskip("transformers")


def test_a_missing_megatron_is_told_before_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dist_checkpoint(tmp_path / "run" / "iter_0000002")
    (tmp_path / "run" / TRACKER).write_text("2")
    hidden = tmp_path / "megatron"  # one without its training loop, found first
    hidden.mkdir()
    (hidden / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    words = ["export-hf", "--load", str(tmp_path / "run"), "--save", str(tmp_path / "model"), "--verify"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2 and "there is no Megatron here: pip install megatron-core" in done.output, done.output
    assert not (tmp_path / "model").exists()


def test_a_comparison_that_takes_too_long_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(command: list[str], **given: Any) -> None:
        raise subprocess.TimeoutExpired(command, given["timeout"])

    monkeypatch.setattr(verify.subprocess, "run", late)
    with pytest.raises(CheckpointError, match=r"took more than 3600 s .*: model is whole and was not compared"):
        verify._megatron_logits(tmp_path, torch.zeros(1, 4, dtype=torch.long), "float32", Path("model"))


@pytest.mark.parametrize("agrees", [True, False])
def test_the_status_tells_whether_models_agree(agrees: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here Megatron's logits are the exported model's, with two tokens of padding; or those of each next token."""

    def megatrons(folder: Path, tokens: torch.Tensor, dtype: str, model: Path) -> torch.Tensor:
        logits = verify._exported_logits(model, tokens)
        return torch.nn.functional.pad(logits if agrees else logits.roll(1, dims=-1), (0, 2), value=9.0)

    monkeypatch.setattr(verify, "refuse_without_megatron", lambda: None)
    monkeypatch.setattr(verify, "_megatron_logits", megatrons)
    dist_checkpoint(tmp_path / "run")
    words = ["--load", str(tmp_path / "run"), "--save", str(tmp_path / "model"), "--vocab-size", "10", "--verify"]
    done = CliRunner().invoke(app, ["export-hf", *words])
    assert (done.exit_code, "DIFFER" in done.output, "agree:" in done.output) == (int(not agrees), not agrees, agrees)
