# SPDX-License-Identifier: Apache-2.0
"""One start of a run: by its documented command word for word, or the same with the imports shared.

A shared start saves the imports, nine tenths of the time: its ranks are forked from a process that has imported
everything. torchrun, the launch script, processes, signals, exit statuses and files are real in both.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from launch.planned import python_path
from tests.faults import strike
from tests.helpers import jobs

ROOT = Path(__file__).resolve().parents[2]
INSIDE = Path(__file__).resolve().parent / "inside"
COMMAND, SHARED = "command", "shared"


class Start:
    """A start that goes on in the background: the launch script and its words, with a log for all its processes."""

    def __init__(
        self, way: str, words: Sequence[str], *, processes: int, log: Path, notes: Path, environment: Mapping[str, str]
    ) -> None:
        self.notes, self.log, self.began = notes, log, time.time()
        for old in (*notes.glob("pid.*"), notes / strike.EVENTS):
            old.unlink(missing_ok=True)
        own = {"OMP_NUM_THREADS": "1", **environment}
        start = _by_command if way == COMMAND else _shared
        self._job: Any = start([f"--nproc-per-node={processes}", *words], own, log)
        self.pid: int = self._job.pid

    def poll(self) -> int | None:
        """Return the status, as a shell reports it; None while it runs."""
        if isinstance(self._job, subprocess.Popen):
            status = self._job.poll()
        else:
            self._job.join(0)
            status = self._job.exitcode
        return status if status is None or status >= 0 else 128 - status

    def rank(self, number: int) -> int | None:
        with suppress(OSError, ValueError):
            return int((self.notes / f"pid.{number}").read_text())
        return None

    def groups(self) -> set[int]:
        """Process groups: each rank leads one, and what it starts belongs to it."""
        return {pid for path in self.notes.glob("pid.*") if (pid := self.rank(int(path.suffix[1:])))}

    def kill(self) -> None:
        """All of it at once, as a node that dies."""
        for pid in jobs.with_descendants([self.pid, *self.groups()]):
            jobs.send(pid, signal.SIGKILL)


def _by_command(words: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    processes, script, *rest = words
    paths = {"PYTHONPATH": python_path(INSIDE, ROOT)}
    with log.open("ab") as output:
        return subprocess.Popen(
            ["bash", script, processes, *rest],
            cwd=ROOT,
            env={**os.environ, **environment, **paths},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


@cache
def _server() -> Any:
    """Return the process that ranks are forked from, which has their imports, one thread and no process group."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.megatron.preload"])
    return context


def _shared(words: Sequence[str], environment: Mapping[str, str], log: Path) -> Any:
    agent = _server().Process(target=_agent, args=(list(words), dict(environment), str(log)))
    agent.start()
    return agent


def _agent(words: list[str], environment: dict[str, str], log: str) -> None:
    """torchrun, which would start Python with the script in every rank, and here lets the server fork."""
    from multiprocessing import forkserver

    from torch.distributed import run

    from launch import agent

    _settle_in(environment, log)
    forkserver._forkserver.ensure_running = lambda: None  # its own is there; Python would start another one
    processes, script, *rest = words
    read = run.config_from_args

    def shared(options: Any) -> tuple[Any, Any, list[Any]]:
        config, _, _ = read(options)
        config.start_method = "forkserver"
        return config, _rank, [script, rest, environment, log]

    run.config_from_args = shared
    sys.exit(agent.main([processes, "--standalone", script, *rest]))


def _rank(script: str, words: list[str], environment: dict[str, str], log: str) -> None:
    """`python SCRIPT WORDS` of one rank."""
    _own_group()
    _settle_in(environment, log)
    strike.install()
    _share_the_manager()
    sys.argv = [script, *words]
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    strike.retire()  # torchrun waits for ever for a function that is killed after it has returned
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(0)  # and a function would wait for ever for a torchrun that was killed


def _own_group() -> None:
    """As torchrun starts Python: what a rank leaves behind can be recognised by its group."""
    os.setpgid(0, 0)


def _settle_in(environment: dict[str, str], log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(output, stream.fileno())
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a killed rank must leave what it said
    os.environ.update(environment)
    os.chdir(ROOT)


def _share_the_manager() -> None:
    """The process through which Megatron's writer of checkpoints answers: forked, which saves the imports."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    spawned = filesystem_async.get_write_results_queue
    filesystem_async.get_write_results_queue = lambda *_: spawned("fork")
