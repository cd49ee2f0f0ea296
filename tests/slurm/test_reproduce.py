# SPDX-License-Identifier: Apache-2.0
"""An experiment whose runs are jobs of a real SLURM: submitted by one call, collected by another."""

from __future__ import annotations

import csv
import re
import sys
import time
from pathlib import Path

from simreg_megatron.installed import python_path
from tests.megatron.runs import ROOT
from tests.slurm.chains import SITE

PLAN = """
name: two
question: Does it end?
sizes: [tiny]
steps: {tiny: 12}
seeds: 1
arms:
  cross-entropy: {}
  simreg: {flags: {simreg-lambda: 1}}
"""


def test_submitted_by_one_call_and_collected_by_another(cluster, text, tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text(PLAN)
    (tmp_path / "my.env").write_text(SITE.replace("TIME=10", "TIME=30"))
    command = [sys.executable, "-m", "simreg_megatron.cli", "reproduce", str(tmp_path / "two.yaml")]
    command += ["--data", str(text.folder), "--slurm", str(tmp_path / "my.env"), "--output", str(tmp_path / "out")]

    def call() -> str:
        return cluster.ask(*command, environment={"PYTHONPATH": python_path(ROOT)})

    assert "0 ended, 0 in the queue, 2 submitted now" in call()
    end = time.monotonic() + 300
    told = ""
    while "2 ended" not in told and time.monotonic() < end:
        time.sleep(3)
        told = call()
    assert "2 ended, 0 in the queue, 0 submitted now" in told, told
    rows = list(csv.DictReader((tmp_path / "out" / "two.csv").open()))
    assert [(row["arm"], row["status"], row["steps"]) for row in rows] == [
        ("cross-entropy", "done", "12"), ("simreg", "done", "12"),
    ]  # fmt: skip
    assert rows[0]["validation_loss"] != rows[1]["validation_loss"] and float(rows[1]["simreg_loss"]) > 0
    assert not list((tmp_path / "out" / "runs").glob("*/checkpoints")), "what has ended needs no checkpoints"
    assert re.search(r"2 ended", call()), "and is not submitted again"
