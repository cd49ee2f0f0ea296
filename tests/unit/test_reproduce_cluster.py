# SPDX-License-Identifier: Apache-2.0
"""Experiments on a cluster, with stand-ins for squeue and for the submission: submitted once, collected once."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

from launch import progress
from launch.slurm import chain, submit
from simreg_megatron.reproduce import cluster, local
from simreg_megatron.reproduce.dataset import Dataset
from simreg_megatron.reproduce.errors import ReproduceError
from simreg_megatron.reproduce.plan_file import plan_of
from simreg_megatron.reproduce.runs import Run, distinct, entries_of
from simreg_megatron.reproduce.store import Store
from simreg_megatron.reproduce.tuned import untuned
from tests.helpers import jobs
from tests.unit.test_reproduce_local import TRAINER

SUBMIT = """
import pathlib, sys
words = sys.argv[1:]
name, folder = (words[words.index(option) + 1] for option in ("--name", "--output"))
pathlib.Path(folder, "slurm").mkdir(exist_ok=True)
pathlib.Path(folder, "submitted").write_text(chr(10).join(words))
with open("QUEUE", "a") as queue:
    queue.write(name + chr(10))
"""


class Site:
    """A cluster whose jobs end when a test says so."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queue, self.trainer, self.settings = folder / "queue", folder / "train.py", folder / "my.env"
        self.queue.touch()
        self.trainer.write_text(TRAINER)
        (folder / "submit.py").write_text(SUBMIT.replace("QUEUE", str(self.queue)))
        (folder / "bin").mkdir()
        (folder / "bin" / "squeue").write_text(f"#!/bin/sh\ncat {self.queue}\n")
        (folder / "bin" / "squeue").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")
        monkeypatch.setattr(local, "launcher_of", lambda family: self.trainer)
        monkeypatch.setattr(cluster, "_SUBMIT", (str(folder / "submit.py"),))

    def lose(self, run: Run) -> None:
        """A job is out of the queue, and nothing of it has begun."""
        self.queue.write_text(self.queue.read_text().replace(f"{run.name}\n", ""))

    def leave(self, store: Store, run: Run, *, trains: bool = True) -> None:
        """A job is out of the queue, having trained or failed."""
        folder = store.run_folder(run)
        self.lose(run)
        (folder / chain.BOOK).parent.mkdir(exist_ok=True)
        (folder / "slurm" / chain.BOOK).write_text("{}\n")
        words = (folder / "submitted").read_text().splitlines()
        done = jobs.run([sys.executable, *words[words.index(str(self.trainer)) :]])
        (folder / "slurm" / "7_1.log").write_text(done.stdout)
        if trains and done.returncode == 0:
            (folder / progress.ENDED).write_text("{}")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return Dataset(tmp_path, digest="0" * 64, bytes_per_token=4.0, validation_tokens=20_481)


def plan(**flags: object):
    arms = {"plain": {"flags": {"lr": 2e-3, **flags}}, "simreg": {"flags": {"lr": 4e-3, **flags}}}
    content = {"name": "mine", "question": "?", "sizes": ["tiny"], "steps": {"tiny": 6}, "seeds": 1, "arms": arms}
    return plan_of(content, where="mine")


def counts(standing: cluster.Standing) -> tuple[int, ...]:
    return tuple(map(len, (standing.ended, standing.queued, standing.submitted, standing.failed)))


def test_each_run_is_submitted_once_and_collected_once(tmp_path: Path, dataset: Dataset, site: Site) -> None:
    store, entries = Store(tmp_path / "out"), entries_of(plan(), dataset, untuned)
    first, second = distinct(entries)

    def call() -> cluster.Standing:
        return cluster.run_on_cluster([first, second], store, dataset, site=site.settings)

    assert counts(call()) == (0, 0, 2, 0)
    assert counts(call()) == (0, 2, 0, 0), "both wait"
    site.leave(store, first)
    standing = call()
    assert counts(standing) == (1, 1, 0, 0)
    assert standing.sentence == (
        "1 ended, 1 in the queue, 0 submitted now; run the same command again to collect what has ended by then"
    )
    site.leave(store, second)
    assert counts(call()) == counts(call()) == (2, 0, 0, 0)
    store.write_tables(plan(), entries)
    rows = list(csv.DictReader((tmp_path / "out" / "mine.csv").open()))
    assert [row["status"] for row in rows] == ["done", "done"] and float(rows[0]["validation_loss"]) < 5


def test_what_is_submitted_is_what_a_chain_takes(tmp_path: Path, dataset: Dataset, site: Site) -> None:
    """Its own option to resume is left out, as the chain adds it, and every run saves."""
    store = Store(tmp_path / "out")
    (run,) = distinct(entries_of(plan(), dataset, untuned))[:1]
    cluster.run_on_cluster([run], store, dataset, site=site.settings)
    words = (store.run_folder(run) / "submitted").read_text().splitlines()
    assert words[:4] == ["--cluster", str(site.settings), "--name", run.name]
    assert "--auto-resume" not in words and words[-2:] == ["--save-interval", "1"]
    options = submit.make_submit_parser().parse_args([*words[:4], words[4]])
    assert (options.cluster, options.name) == (site.settings, run.name)


def test_a_failure_is_told_once_and_then_tried_again(tmp_path: Path, dataset: Dataset, site: Site) -> None:
    store = Store(tmp_path / "out")
    (run,) = distinct(entries_of(plan(), dataset, untuned))[:1]
    cluster.run_on_cluster([run], store, dataset, site=site.settings)
    site.leave(store, run, trains=False)
    standing = cluster.run_on_cluster([run], store, dataset, site=site.settings)
    assert counts(standing) == (0, 0, 0, 1) and store.failure(run) is not None
    assert counts(cluster.run_on_cluster([run], store, dataset, site=site.settings)) == (0, 0, 1, 0)
    site.leave(store, run)
    assert counts(cluster.run_on_cluster([run], store, dataset, site=site.settings)) == (1, 0, 0, 0)


def test_a_job_that_never_began_has_failed(tmp_path: Path, dataset: Dataset, site: Site) -> None:
    store = Store(tmp_path / "out")
    (run,) = distinct(entries_of(plan(), dataset, untuned))[:1]
    for _ in range(2):
        assert counts(cluster.run_on_cluster([run], store, dataset, site=site.settings)) == (0, 0, 1, 0)
        site.lose(run)
        assert counts(cluster.run_on_cluster([run], store, dataset, site=site.settings)) == (0, 0, 0, 1)
        assert not (store.run_folder(run) / "log.txt").exists()
    assert counts(cluster.run_on_cluster([run], store, dataset, site=site.settings)) == (0, 0, 1, 0)
    site.leave(store, run)
    assert counts(cluster.run_on_cluster([run], store, dataset, site=site.settings)) == (1, 0, 0, 0)


def test_an_end_without_a_loss_is_submitted_again(tmp_path: Path, dataset: Dataset, site: Site) -> None:
    """The submission refuses a run that says it has ended."""
    store = Store(tmp_path / "out")
    (run,) = distinct(entries_of(plan(lr=0.2), dataset, untuned))[:1]
    cluster.run_on_cluster([run], store, dataset, site=site.settings)
    site.leave(store, run)
    assert counts(cluster.run_on_cluster([run], store, dataset, site=site.settings)) == (0, 0, 0, 1)
    assert counts(cluster.run_on_cluster([run], store, dataset, site=site.settings)) == (0, 0, 1, 0)
    assert not (store.run_folder(run) / progress.ENDED).exists()
    site.leave(store, run)
    assert counts(cluster.run_on_cluster([run], store, dataset, site=site.settings)) == (1, 0, 0, 0)


def test_a_run_that_diverged_has_ended(tmp_path: Path, dataset: Dataset, site: Site) -> None:
    store = Store(tmp_path / "out")
    (run,) = distinct(entries_of(plan(lr=0.5), dataset, untuned))[:1]
    cluster.run_on_cluster([run], store, dataset, site=site.settings)
    site.leave(store, run)
    assert counts(cluster.run_on_cluster([run], store, dataset, site=site.settings)) == (1, 0, 0, 0)
    assert store.result(run)["status"] == "diverged"


def test_what_the_cluster_refuses_is_one_sentence(tmp_path: Path, dataset: Dataset, site: Site, monkeypatch) -> None:
    store, runs = Store(tmp_path / "out"), distinct(entries_of(plan(), dataset, untuned))
    (tmp_path / "submit.py").write_text("import sys; sys.exit('> a note\\nerror: no such partition')")
    with pytest.raises(ReproduceError, match=r"^no such partition$"):
        cluster.run_on_cluster(runs, store, dataset, site=site.settings)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ReproduceError, match="squeue is not on this machine: submit from a login node"):
        cluster.run_on_cluster(runs, store, dataset, site=site.settings)
