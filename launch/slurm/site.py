# SPDX-License-Identifier: Apache-2.0
"""Read and check `cluster.env`: what differs between clusters."""

from __future__ import annotations

import re
import shlex
import string
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from launch.flags import LaunchError

DEFAULT = Path(__file__).resolve().parent / "cluster.env"
RUNTIMES = ("venv", "pyxis", "apptainer")
_ABOUT_GPUS = ("gpu_request", "cpus_per_task", "sbatch_extra", "layout")  # what is sound without a line on CPUs alone
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
        is_container = self.runtime != "venv"
        if self.runtime not in RUNTIMES:
            raise LaunchError(f"RUNTIME is {', '.join(RUNTIMES)}, not {self.runtime[:200]!r}")
        if is_container and not self.container_image:
            raise LaunchError(f"RUNTIME={self.runtime} needs an image: set CONTAINER_IMAGE, or RUNTIME=venv")
        if self.container_image and not is_container:
            instead = "leave it empty, or name pyxis or apptainer"
            raise LaunchError(f"CONTAINER_IMAGE has no effect with RUNTIME=venv: {instead}")
        if "--gpus-per-task" in self.gpu_request + self.sbatch_extra:
            instead = "use --gpus-per-node=N or --gres=gpu:N"
            raise LaunchError(f"--gpus-per-task hides a node's other GPUs from each process: {instead}")


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
            raise LaunchError(f"{place}: {line[:200]!r} is neither NAME=value nor export NAME=value")
        name, value = match["name"], _value(match["value"], variables, place)
        if match["export"]:
            environment[name] = value
            continue
        if name not in known:
            raise LaunchError(
                f"{place}: no setting is called {name[:200]}: it is one of {', '.join(sorted(known))}; "
                "a variable for the processes is written `export NAME=value`"
            )
        is_number = known[name].type == "int"
        if is_number and (not value.isdecimal() or len(value) > 9):
            raise LaunchError(f"{place}: {name} takes a number, not {value[:200]!r}")
        settings[name.lower()] = int(value) if is_number else value
    site = Site(**settings, environment=environment)
    lacking = [name for name in _ABOUT_GPUS if name not in settings]
    if site.gpus_per_node and lacking:
        raise LaunchError(
            f"{path} has no line {lacking[0].upper()}=: take it from {DEFAULT}; it may be empty, but a job on GPUs "
            "needs the line"
        )
    return site


def _value(text: str, variables: Mapping[str, str], place: str) -> str:
    try:
        words = shlex.split(text, comments=True)
        filled = string.Template(" ".join(words)).substitute(variables)
    except (ValueError, KeyError) as error:
        what = f"${str(error.args[0])[:200]} is not set" if isinstance(error, KeyError) else str(error)
        raise LaunchError(f"{place}: {what}") from None
    if len(words) > 1:
        raise LaunchError(f'{place}: quote a value of several words: "{" ".join(words)[:200]}"')
    return filled
