# SPDX-License-Identifier: Apache-2.0
"""Kept inputs and mutations of them, read again; and a bar that shows it can be missed."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import jobs

pytest.importorskip("transformers")

from tests.fuzz.bar import install, judge
from tests.fuzz.loop import fuzz
from tests.fuzz.readers import TARGETS
from tests.fuzz.target import CORPUS, REGRESSIONS, Target

ROOT = Path(__file__).resolve().parents[2]
KEPT = sorted(path.relative_to(REGRESSIONS).as_posix() for path in REGRESSIONS.glob("*/*"))


@pytest.mark.parametrize("name", TARGETS)
def test_valid_files_are_read(name: str, tmp_path: Path) -> None:
    """Else a target that refuses everything would pass all that follows."""
    TARGETS[name].begin(tmp_path)
    for path in sorted((CORPUS / name).iterdir()):
        TARGETS[name].read(tmp_path, path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_mutations_meet_the_bar(name: str) -> None:
    outcome = fuzz(TARGETS[name], mutations=TARGETS[name].mutations)
    assert not outcome.findings, told(outcome.findings)
    assert outcome.inputs > TARGETS[name].mutations


@pytest.mark.parametrize("kept", KEPT)
def test_what_once_broke_a_reader_meets_the_bar(kept: str, tmp_path: Path) -> None:
    name, data = kept.partition("/")[0], (REGRESSIONS / kept).read_bytes()
    install()
    TARGETS[name].begin(tmp_path)
    for seed in sorted((CORPUS / name).iterdir()):
        judge(TARGETS[name], tmp_path, seed.read_bytes())  # libraries load their parts late
    judge(TARGETS[name], tmp_path, b"")
    assert judge(TARGETS[name], tmp_path, data) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_half_a_minute_of_each(name: str, tmp_path: Path) -> None:
    """In a process of its own, which a library may take down."""
    command = [sys.executable, "-m", "tests.fuzz.one", name, str(tmp_path / "run"), "30", "--plain", "--seed", "7"]
    done = jobs.run(command, cwd=ROOT)
    findings = tmp_path / "run" / "findings.txt"
    assert done.returncode == 0, f"{done.stderr[-2000:]}\nthe input: {tmp_path / 'run' / 'current'}"
    assert not findings.exists(), findings.read_text()


def told(findings: dict) -> str:
    return "\n".join(f"{finding.kind}: {finding.says} {data[:200]!r}" for finding, data in findings.values())


# ---- the bar itself --------------------------------------------------------------------------------------------------


def _lines(folder: Path, data: bytes) -> None:
    raise ValueError("one line\nand another")


def _grows(folder: Path, data: bytes) -> None:
    bytearray(200 << 20)


def _spins(folder: Path, data: bytes) -> None:
    start = time.process_time()
    while time.process_time() - start < 1.2:
        pass


def _connects(folder: Path, data: bytes) -> None:
    with socket.socket() as opened:
        opened.connect_ex(("127.0.0.1", 9))


@pytest.mark.parametrize(
    ("read", "kind"),
    [
        (lambda folder, data: {}["x"], "crash"),
        (_lines, "sentence"),
        (_grows, "memory"),
        (_spins, "slow"),
        (_connects, "deed"),
        (lambda folder, data: os.system("true"), "deed"),  # noqa: S605
        (lambda folder, data: (folder.parent / "outside").write_text(""), "deed"),
        (lambda folder, data: __import__("isoscore_of_nobody"), "deed"),
        (lambda folder, data: (folder / "inside").write_bytes(data), None),
    ],
    ids=["crash", "two lines", "memory", "slow", "network", "shell", "write", "import", "none"],
)
def test_the_bar_can_be_missed(read: Callable[[Path, bytes], object], kind: str | None, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    install()
    found = judge(Target("test", read, (ValueError,)), tmp_path / "own", b"")
    assert (found and found.kind) == kind
