# SPDX-License-Identifier: Apache-2.0
"""Read a cluster's settings, and write the text of a job: `pretrain.sbatch` with its two marked lines filled in."""

from __future__ import annotations

import re
import shlex
import string
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from launch.flags import LaunchError
from launch.planned import ROOT
from launch.signals import SAVE_AND_LEAVE

_TEMPLATE = Path(__file__).resolve().parent / "pretrain.sbatch"
DEFAULT = Path(__file__).resolve().parent / "cluster.env"
RUNTIMES = ("venv", "pyxis", "apptainer")
_ASSIGNMENT = re.compile(r"(?P<export>export\s+)?(?P<name>[A-Za-z_][A-Za-z0-9_]*)=(?P<value>.*)")


@dataclass(frozen=True)
class Site:
    """The settings of a cluster; each is explained in launch/slurm/cluster.env."""

    account: str = ""
    partition: str = ""
    qos: str = ""
    constraint: str = ""
    gpus_per_node: int = 8
    gpu_memory: int = 80
    gpu_request: str = ""
    cpus_per_task: str = "1"
    sbatch_extra: str = ""
    time: str = "4:00:00"
    runtime: str = "venv"
    python: str = ""
    container_image: str = ""
    container_mounts: str = ""
    host_python: str = ""
    layout: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def ranks_per_node(self) -> int:
        return max(1, self.gpus_per_node)

    def __post_init__(self) -> None:
        if self.runtime not in RUNTIMES:
            raise LaunchError(f"RUNTIME is {', '.join(RUNTIMES)}, not {self.runtime!r}")
        if self.runtime != "venv" and not self.container_image:
            raise LaunchError(f"RUNTIME={self.runtime} needs an image: set CONTAINER_IMAGE, or RUNTIME=venv")


def read_site(path: Path, variables: Mapping[str, str]) -> Site:
    """Read the file at `path`; `variables` fill in $NAMES. A LaunchError names the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise LaunchError(f"{path} cannot be read ({why}): give a file of settings such as {DEFAULT}") from None
    known = {item.name.upper(): item for item in fields(Site) if item.name != "environment"}
    settings: dict[str, Any] = {}
    environment: dict[str, str] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        place = f"{path}, line {number}"
        if not line or line.startswith("#"):
            continue
        match = _ASSIGNMENT.fullmatch(line)
        if match is None:
            raise LaunchError(f"{place}: {line!r} is neither NAME=value nor export NAME=value")
        name, value = match["name"], _value(match["value"], variables, place)
        if match["export"]:
            environment[name] = value
            continue
        if name not in known:
            raise LaunchError(
                f"{place}: no setting is called {name}: it is one of {', '.join(sorted(known))}; "
                "a variable for the processes is written `export NAME=value`"
            )
        is_number = known[name].type == "int"
        if is_number and not value.isdecimal():
            raise LaunchError(f"{place}: {name} takes a number, not {value!r}")
        settings[name.lower()] = int(value) if is_number else value
    return Site(**settings, environment=environment)


def _value(text: str, variables: Mapping[str, str], place: str) -> str:
    try:
        words = shlex.split(re.split(r"(?:^|\s)#", text)[0])  # as in bash, a # inside a word begins no comment
        filled = string.Template(" ".join(words)).substitute(variables)
    except (ValueError, KeyError) as error:
        what = f"${error.args[0]} is not set" if isinstance(error, KeyError) else str(error)
        raise LaunchError(f"{place}: {what}") from None
    if len(words) > 1:
        raise LaunchError(f'{place}: quote a value of several words: "{" ".join(words)}"')
    return filled


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
        "--output": "/dev/null",  # the script opens its log: SLURM ends a job without a word if it cannot
        # Megatron saves and leaves at --exit-duration-in-mins; should that be late, it does at this signal.
        "--signal": f"{SAVE_AND_LEAVE}@{max(1, job.reserve // 2)}",
    }
    yield from (_directive(f"{name}={value}") for name, value in flags.items() if value != "")
    yield "#SBATCH --requeue"
    yield from map(_directive, shlex.split(f"{site.gpu_request} {site.sbatch_extra}"))


def _directive(word: str) -> str:
    """Write a line of the head, which sbatch cuts at blanks that are not quoted."""
    if '"' in word or not word.isprintable():
        raise LaunchError(f"{word!r} cannot stand in the head of a job: leave out quotes and line breaks")
    return f'#SBATCH "{word}"' if set(" '") & set(word) else f"#SBATCH {word}"


def _settings(job: Job) -> Iterator[str]:
    site = job.site
    python = site.python or (sys.executable if site.runtime == "venv" else "python3")
    host_python = site.host_python or (python if site.runtime == "venv" else "python3")
    for name, value in {
        "ROOT": ROOT, "FOLDER": Path.cwd(), "OUTPUT": job.output, "SAVE": job.save, "KEEP": job.keep,
        "RESERVE": job.reserve, "HOST_PYTHON": host_python,
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
