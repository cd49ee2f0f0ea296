# SPDX-License-Identifier: Apache-2.0
"""The life of a chain on a real SLURM of two nodes: what ends a slice, and that nothing is lost by it.

Losses, SimReg losses and gradient norms equal, bit for bit, those of a run that was never interrupted.
"""

import math
import re
import signal
import time
from pathlib import Path

import pytest

from launch import checkpoints
from launch.slurm.chain import STOP
from tests.helpers import jobs
from tests.slurm import chains
from tests.slurm.chains import SAVE_INTERVAL, submit, whole_run, words

SHORT = 60  # iterations


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, float]]:
    return whole_run(text, SHORT, tmp_path_factory.mktemp("whole") / "run")[0]


def assert_nothing_lost(chain: chains.Chain, whole: dict[str, dict[int, float]]) -> None:
    assert (chain.output / "ended.json").exists(), chain.log[-6000:]
    assert chains.scalars(chain.output) == whole
    assert len(whole["lm loss"]) == max(whole["lm loss"]), "every step must be there"


def test_what_is_submitted_is_what_the_dry_run_printed(cluster, text, tmp_path: Path) -> None:
    chain = submit(cluster, tmp_path / "run", words(text, SHORT), "--slices", "1")
    cluster.ask("scancel", chain.job)
    held = cluster.ask("scontrol", "write", "batch_script", chain.job, "-")
    chain.wait()
    site = ["--cluster", str(tmp_path / "cluster.env")]
    command = ["bash", str(chains.SUBMIT), *site, "--nodes", "2", "--reserve", "0.5"]
    run = [chains.SCRIPT, *words(text, SHORT), "--output", str(chain.output)]
    printed = cluster.ask(*command, "--slices", "1", "--dry-run", *run)
    script = [line for line in printed.splitlines() if not line.startswith("> ")]  # without notes
    assert script[0] == "#!/bin/bash" and held.splitlines() == script


def test_time_limit_save_exit_next_slice_end(cluster, text, whole, tmp_path: Path) -> None:
    """Slices of two minutes: the run is made to last longer, on machines of any speed."""
    rehearsal, step = whole_run(text, SHORT, tmp_path / "rehearsal")
    assert rehearsal == whole, "the same run twice must be the same numbers"
    iterations = math.ceil(90 / step)  # of which a slice has less than one minute
    chain = submit(cluster, tmp_path / "run", words(text, iterations), "--time", "2")
    chain.wait(seconds=900)
    begins, ends = chain.events("begin"), chain.events("end")
    assert len(begins) == len(ends) >= 2, chain.log[-4000:]
    assert [event["iteration"] for event in begins[1:]] == [event["iteration"] for event in ends[:-1]]
    assert all(event["status"] == 0 for event in ends)
    assert re.search(r"exiting program after", chain.log), "the first slice must have ended by its time"
    assert "the run has reached its end" in chain.log
    assert len(begins) < 90, "the slices that were not needed must be gone"
    assert_nothing_lost(chain, whole_run(text, iterations, tmp_path / "whole")[0])
    records = sorted((chain.output / "record").iterdir())
    assert len(records) == len(begins)
    for name in ("command.txt", "flags.txt", "environment.txt", "versions.json", "job.sbatch"):
        assert (records[0] / name).stat().st_size > 0, name


def test_scancel_of_a_slice_and_of_the_chain(cluster, text, whole, tmp_path: Path) -> None:
    chain = submit(cluster, tmp_path / "run", words(text, SHORT))
    chain.until_saved(SAVE_INTERVAL)
    cluster.ask("scancel", f"{chain.job}_1")
    chain.until(lambda: len(chain.events("begin")) == 2, "the second slice")
    chain.until_saved(3 * SAVE_INTERVAL)
    cluster.ask("scancel", chain.job)
    chain.wait()
    assert not (chain.output / "ended.json").exists()
    again = submit(cluster, tmp_path / "run", words(text, SHORT))
    again.wait()
    assert again.events("begin")[0]["iteration"] >= 3 * SAVE_INTERVAL
    assert_nothing_lost(again, whole)


def test_the_stop_file_saves_first(cluster, text, whole, tmp_path: Path) -> None:
    chain = submit(cluster, tmp_path / "run", words(text, 2000))
    chain.until_saved(SAVE_INTERVAL)
    (chain.output / STOP).touch()
    chain.wait()
    assert "exiting program after receiving SIGTERM" in chain.log
    assert [event["status"] for event in chain.events("end")] == [0]
    assert chain.events("end")[0]["iteration"] == max(chains.scalars(chain.output)["lm loss"]), "the last step is saved"
    with pytest.raises(AssertionError, match="stops every slice: remove it first"):
        submit(cluster, tmp_path / "run", words(text, 2000))


def test_the_signal_at_the_end_of_a_slice(cluster, text, whole, tmp_path: Path) -> None:
    """If the duration comes too late, SLURM's signal saves: here it is sent as SLURM sends it."""
    chain = submit(cluster, tmp_path / "run", words(text, SHORT))
    chain.until_saved(SAVE_INTERVAL)
    assert "#SBATCH --signal=URG@15" in (chain.output / "slurm" / "job.sbatch").read_text()
    cluster.ask("scancel", "--signal=URG", f"{chain.job}_1")
    chain.wait()
    ends = chain.events("end")
    assert len(ends) == 2 and [event["status"] for event in ends] == [0, 0], chain.log[-4000:]
    assert ends[0]["iteration"] % SAVE_INTERVAL or "exiting program after receiving" in chain.log
    assert_nothing_lost(chain, whole)


def test_a_run_in_the_queue_is_not_submitted_twice(cluster, text, tmp_path: Path) -> None:
    chain = submit(cluster, tmp_path / "run", words(text, 2000))
    with pytest.raises(AssertionError, match="in the queue already"):
        submit(cluster, tmp_path / "run", words(text, 2000))
    cluster.ask("scancel", chain.job)
    chain.wait()


def test_a_node_dies(cluster, text, whole, tmp_path: Path) -> None:
    chain = submit(cluster, tmp_path / "run", words(text, SHORT))
    chain.until_saved(SAVE_INTERVAL)
    cluster.kill_node("n2")
    chain.until(lambda: "n2 down" in cluster.ask("sinfo", "-h", "-N", "-o", "%N %t"), "n2 is down")
    assert not (chain.output / "ended.json").exists()
    cluster.start_node("n2")
    chain.wait()
    assert len(chain.events("begin")) >= 2
    assert_nothing_lost(chain, whole)


def test_kill_9_in_the_middle_of_a_save(cluster, text, whole, tmp_path: Path) -> None:
    chain = submit(cluster, tmp_path / "run", words(text, SHORT))
    chain.until_saved(SAVE_INTERVAL)
    torn = _kill_while_saving(chain)
    assert torn, "no save was met"
    chain.wait()
    assert f"{torn} was never finished: deleted" in chain.log
    assert [event["status"] != 0 for event in chain.events("end")] == [True, False]
    assert_nothing_lost(chain, whole)


def _kill_while_saving(chain: chains.Chain) -> Path | None:
    """Kill all ranks as soon as a checkpoint has been begun; the folder, if it was left torn."""
    ranks, known = chain.ranks(), set(checkpoints.iterations(chain.save))
    assert len(ranks) == 2
    end = time.monotonic() + 120
    while time.monotonic() < end:
        fresh = set(checkpoints.iterations(chain.save)) - known
        if fresh:
            for rank in ranks:
                jobs.send(rank, signal.SIGKILL)
            folder = checkpoints.path_of(chain.save, max(fresh))
            return folder if checkpoints.is_torn(folder) else None
        time.sleep(0.001)
    return None


def test_a_full_disk_ends_the_chain_and_loses_nothing(cluster, text, whole, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    size = _checkpoint_bytes(cluster, text, tmp_path) * 5 // 2  # two checkpoints and a half
    jobs.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], check=True)
    try:
        run = [*words(text, SHORT), "--save", str(disk / "checkpoints")]
        chain = submit(cluster, tmp_path / "run", run, "--keep", "9")
        chain.wait()
        assert len(chain.events("end")) == 2, chain.log[-6000:]
        assert f"nothing saved beyond iteration {2 * SAVE_INTERVAL}, where the slice before it failed" in chain.log
        jobs.run(["mount", "-o", f"remount,size={20 * size}", str(disk)], check=True)
        again = submit(cluster, tmp_path / "run", run, "--keep", "9")
        again.wait()
        assert again.events("begin")[0]["iteration"] == 2 * SAVE_INTERVAL
        assert_nothing_lost(again, whole)
    finally:
        jobs.run(["umount", str(disk)], check=True)


def _checkpoint_bytes(cluster, text, folder: Path) -> int:
    chain = submit(cluster, folder / "size", words(text, SAVE_INTERVAL))
    chain.wait()
    newest = checkpoints.newest_whole(chain.save)
    assert newest == SAVE_INTERVAL, chain.log[-4000:]
    return sum(path.stat().st_size for path in checkpoints.path_of(chain.save, newest).rglob("*") if path.is_file())


def test_only_the_newest_checkpoints_are_kept(cluster, text, whole, tmp_path: Path) -> None:
    chain = submit(cluster, tmp_path / "run", words(text, SHORT), "--keep", "2")
    chain.wait()
    assert checkpoints.iterations(chain.save) == [SHORT - SAVE_INTERVAL, SHORT]
    assert_nothing_lost(chain, whole)
