# SPDX-License-Identifier: Apache-2.0
"""Write the text of a job: `pretrain.sbatch` with its two marked lines filled in."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.flags import LaunchError
from launch.planned import ROOT
from launch.signals import SAVE_AND_LEAVE
from launch.slurm.site import Site

_TEMPLATE = Path(__file__).resolve().parent / "pretrain.sbatch"


@dataclass(frozen=True)
class Job:
    """A run as a chain of slices."""

    name: str
    nodes: int
    time: str
    slices: int
    keep: int
    reserve: int  # seconds
    output: Path
    save: Path
    save_interval: int
    train: tuple[str, ...]  # the launch script and its words
    site: Site


def render(job: Job) -> str:
    """Return the text that is submitted; the same job gives the same text."""
    text = re.sub(r"^#@@.*\n", "", _TEMPLATE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for mark, lines in (("head", _head(job)), ("settings", _settings(job))):
        text = text.replace(f"#@ {mark}\n", "".join(f"{line}\n" for line in lines))
    return text


def _head(job: Job) -> Iterator[str]:
    site = job.site
    logs = job.output / "slurm"
    flags = {
        "--job-name": job.name,
        "--account": site.account,
        "--partition": site.partition,
        "--qos": site.qos,
        "--constraint": site.constraint,
        "--nodes": job.nodes,
        "--ntasks-per-node": site.ranks_per_node,
        "--cpus-per-task": site.cpus_per_task,
        "--time": job.time,
        "--array": f"1-{job.slices}%1",  # the chain: one slice at a time
        "--output": logs / "%A_%a.log",
        "--open-mode": "append",  # a slice that SLURM restarts adds to its log
        # Megatron saves and leaves at --exit-duration-in-mins; should that be late, it does at this signal.
        "--signal": f"{SAVE_AND_LEAVE}@{max(1, job.reserve // 2)}",
    }
    try:
        extra = shlex.split(f"{site.gpu_request} {site.sbatch_extra}")
    except ValueError as error:
        raise LaunchError(
            f"GPU_REQUEST and SBATCH_EXTRA are lists of sbatch's flags, not as they are: {error}"
        ) from None
    yield from (_directive(f"{name}={value}") for name, value in flags.items() if value != "")
    yield "#SBATCH --requeue"
    yield from map(_directive, extra)


def _directive(word: str) -> str:
    """Write a line of the head, which sbatch cuts at blanks that are not quoted, and at #."""
    if re.search(r"[#\"'\\]", word) or not word.isprintable():
        raise LaunchError(
            f"sbatch cannot read {word!r} in a job's head: leave out quotes, #, backslashes and line breaks"
        )
    return f'#SBATCH "{word}"' if " " in word else f"#SBATCH {word}"


def _settings(job: Job) -> Iterator[str]:
    site = job.site
    python = site.python or (sys.executable if site.runtime == "venv" else "python3")
    host_python = site.host_python or (python if site.runtime == "venv" else "python3")
    for name, value in {
        "ROOT": ROOT, "FOLDER": Path.cwd(), "OUTPUT": job.output, "SAVE": job.save, "KEEP": job.keep,
        "RESERVE": job.reserve, "SAVE_INTERVAL": job.save_interval, "HOST_PYTHON": host_python,
    }.items():  # fmt: skip
        yield f"{name}={shlex.quote(str(value))}"
    for name, value in {**site.environment, "PYTHON": python}.items():
        yield f"export {name}={shlex.quote(value)}"
    yield f"export PYTHONPATH={shlex.quote(str(ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}"  # what a site puts there stays
    in_srun, in_front = _container(site)
    yield _array("CONTAINER_SRUN", in_srun)
    yield _array("CONTAINER_RUN", in_front)
    yield _array("TRAIN", (*job.train, "--exit-signal-handler"))


def _container(site: Site) -> tuple[list[str], list[str]]:
    """Return words for srun, and words in front of the process."""
    if site.runtime == "pyxis":
        mounts = [f"--container-mounts={site.container_mounts}"] if site.container_mounts else []
        image = [f"--container-image={site.container_image}", "--no-container-mount-home"]
        image.append(f"--container-env={','.join([*site.environment, 'PYTHONPATH'])}")  # else the image's own win
        return [*image, *mounts, f"--container-workdir={Path.cwd()}"], []
    if site.runtime == "apptainer":
        binds = ["--bind", site.container_mounts] if site.container_mounts else []
        return [], ["apptainer", "exec", "--nv", *binds, "--pwd", str(Path.cwd()), site.container_image]
    return [], []


def _array(name: str, words: Sequence[str]) -> str:
    """Write a bash array, one flag per line."""
    lines: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append([])
        lines[-1].append(word)
    rows = "".join(f"  {shlex.join(line)}\n" for line in lines)
    return f"{name}=(\n{rows})" if rows else f"{name}=()"
