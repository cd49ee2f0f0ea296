# SPDX-License-Identifier: Apache-2.0
"""A real SLURM on this machine: munged, slurmctld and two slurmd, on the loopback address, in a folder of their own.

Nothing of an installed cluster is touched: configuration, keys, sockets, state and ports are this folder's.
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.helpers import jobs

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
NODES = ("n1", "n2")
_PATIENCE = 60  # seconds for a daemon to answer


def missing() -> str:
    """Return what is missing to run SLURM, in one sentence; empty if nothing is."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"no {', '.join(absent)} on this machine: apt-get install slurmctld slurmd slurm-client munge"
    if os.geteuid() != 0:
        return "slurmd starts jobs for their users, which takes root"
    return ""


class Cluster:
    """Two nodes that are this machine; `close` ends all that runs on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.conf = folder / "slurm.conf"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {**os.environ, "SLURM_CONF": str(self.conf)}
        for name in ("state", *NODES):
            (folder / name).mkdir(parents=True)
        self._configure()

    def _configure(self) -> None:
        host = socket.gethostname().partition(".")[0]
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        ports = _free_ports(3)
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=1000 State=UNKNOWN"
            for name, port in zip(NODES, ports[1:], strict=True)
        )
        self.conf.write_text(f"""\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={self.folder}/munge.socket
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SchedulerType=sched/builtin
SelectType=select/linear
SlurmdParameters=config_overrides
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=10
InactiveLimit=0
KillWait=5
MinJobAge=300
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/%n/spool
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/%n/slurmd.pid
SlurmctldLogFile={self.folder}/slurmctld.log
SlurmdLogFile={self.folder}/%n/slurmd.log
SchedulerParameters=batch_sched_delay=0,sched_interval=2,defer
{nodes}
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP
""")

    def start(self) -> None:
        work = self.folder
        self._spawn(
            "munged", "munged", "--foreground", "--force", f"--key-file={work}/munge.key",
            f"--socket={work}/munge.socket", f"--pid-file={work}/munged.pid", f"--log-file={work}/munged.log",
            f"--seed-file={work}/munged.seed",
        )  # fmt: skip
        self._until(lambda: (work / "munge.socket").exists(), "munged made no socket")
        self._spawn("slurmctld", "slurmctld", "-D", "-c", "-f", str(self.conf))
        for name in NODES:
            self.start_node(name)
        self._until(
            lambda: (
                sorted(self.ask("sinfo", "-h", "-N", "-o", "%N %t").split("\n")) == [f"{name} idle" for name in NODES]
            ),
            "the nodes did not become idle",
        )

    def start_node(self, name: str) -> None:
        self._spawn(name, "slurmd", "-D", "-N", name, "-f", str(self.conf))

    def kill_node(self, name: str) -> None:
        """The machine is gone: its daemon and all that it started, at once."""
        daemon = self._daemons.pop(name)
        for pid in jobs.with_descendants([daemon.pid]) | _steps_of(name, self.folder):
            jobs.send(pid, signal.SIGKILL)
        daemon.wait()

    def _spawn(self, name: str, *command: str) -> None:
        log = (self.folder / f"{name}.out").open("ab")
        self._daemons[name] = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment)
        log.close()

    def _until(self, holds: object, otherwise: str) -> None:
        end = time.monotonic() + _PATIENCE
        while not holds():  # type: ignore[operator]
            if time.monotonic() > end:
                logs = "\n".join(f"{path}: {path.read_text()[-1500:]}" for path in self.folder.rglob("*.log"))
                raise TimeoutError(f"{otherwise} in {_PATIENCE} s\n{logs}")
            time.sleep(0.2)

    def ask(self, *command: str, environment: Mapping[str, str] | None = None) -> str:
        """Return what a command of SLURM prints; an error is its text."""
        done = subprocess.run(
            command, text=True, env={**self.environment, **(environment or {})},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return done.stdout.strip()

    def close(self) -> None:
        self.ask("scancel", "--user", "root", "--full", "--signal", "KILL")
        self.ask("scancel", "--user", "root")
        end = time.monotonic() + 15
        while self.ask("squeue", "-h") and time.monotonic() < end:
            time.sleep(0.3)
        for name in reversed(list(self._daemons)):
            self._daemons[name].terminate()
        for daemon in self._daemons.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(15)
            daemon.kill()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _steps_of(name: str, folder: Path) -> set[int]:
    """A node's jobs, whose managers left their daemon's family, and all below them."""
    mine = jobs.with_environment(f"SLURMD_NODENAME={name}", f"SLURM_CONF={folder}/slurm.conf")
    return jobs.with_descendants(mine)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
