# SPDX-License-Identifier: Apache-2.0
"""What differs between clusters: `cluster.env`, read and checked."""

from __future__ import annotations

import re
import shlex
import string
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

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
    cpus_per_task: int = 1
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

    def outside(self, *paths: Path) -> list[str]:
        """A note about each path that no mount brings into the container under its own name."""
        words = [mount.split(":") for mount in self.container_mounts.split(",") if mount]
        mounts = [(Path(source), Path(*at[:1] or [source])) for source, *at in words]
        return [
            f"no mount in CONTAINER_MOUNTS holds {path}: unless your site mounts it into every container, the job will "
            f"not find it there; add {path}:{path}"
            for path in paths
            if self.runtime != "venv" and not any(_holds(*mount, path) for mount in mounts)
        ]

    def __post_init__(self) -> None:
        if self.runtime not in RUNTIMES:
            raise LaunchError(f"RUNTIME is {', '.join(RUNTIMES)}, not {self.runtime[:200]!r}")
        if self.runtime != "venv" and not self.container_image:
            raise LaunchError(f"RUNTIME={self.runtime} needs an image: set CONTAINER_IMAGE, or RUNTIME=venv")
        if self.runtime == "venv" and self.container_image:
            raise LaunchError(
                "CONTAINER_IMAGE has no effect with RUNTIME=venv: leave it empty, or name pyxis or apptainer"
            )
        if self.container_mounts and self.runtime == "venv":
            raise LaunchError("CONTAINER_MOUNTS has no effect with RUNTIME=venv: leave it empty")
        if "--gpus-per-task" in self.gpu_request + self.sbatch_extra:
            raise LaunchError(
                "--gpus-per-task hides a node's other GPUs from each process: use --gpus-per-node=N or --gres=gpu:N"
            )
        for name, path in (("PYTHON", self.python), ("HOST_PYTHON", self.host_python)):
            if "/" in path:  # without one it is looked for on the PATH
                check_full(name, path)
        check_full("MEGATRON_PATH", self.environment.get("MEGATRON_PATH", ""))


def _holds(source: Path, target: Path, path: Path) -> bool:
    """Whether a path leads to the same place where `source` is mounted at `target`."""
    return path.is_relative_to(target) and (source / path.relative_to(target)).resolve() == path.resolve()


def check_full(name: str, path: str) -> None:
    """A job's folder is not where it was submitted.

    Raises:
        LaunchError: the path depends on the folder.
    """
    if path and not Path(path).is_absolute():
        raise LaunchError(f"{name}={path[:200]} would be looked for in the job's folder: give the path from / on")


def read_site(path: Path, variables: Mapping[str, str]) -> Site:
    """The file at `path`; `variables` fill in $NAMES.

    Raises:
        LaunchError: it cannot be read, a line is no assignment, or a name is not known.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise LaunchError(f"{path} cannot be read ({why}): give a file of settings such as {DEFAULT}") from None
    known = {item.name: item for item in fields(Site) if item.name != "environment"}
    settings: dict[str, str | int] = {}
    environment: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        place = f"{path}, line {number}"
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _ASSIGNMENT.fullmatch(line.strip())
        if match is None:
            raise LaunchError(f"{place}: {line.strip()[:200]!r} is neither NAME=value nor export NAME=value")
        value = _value(match["value"], variables, place)
        name = match["name"].lower()
        if match["export"]:
            environment[match["name"]] = value
        elif match["name"] != name.upper() or name not in known:
            names = ", ".join(sorted(item.upper() for item in known))
            raise LaunchError(
                f"{place}: no setting is called {match['name'][:200]}: it is one of {names}; "
                "a variable for the processes is written `export NAME=value`"
            )
        else:
            settings[name] = _number(value, match["name"], place) if known[name].type == "int" else value
    site = Site(**settings, environment=environment)  # type: ignore[arg-type]
    lacking = [name for name in _ABOUT_GPUS if name not in settings]
    if site.gpus_per_node and lacking:
        raise LaunchError(
            f"{path} has no line {lacking[0].upper()}=: take it from {DEFAULT}; it may be empty, but without the line "
            "nobody knows what a job on GPUs should ask for"
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


def _number(value: str, name: str, place: str) -> int:
    if not value.isdecimal() or len(value) > 9:
        raise LaunchError(f"{place}: {name} takes a number, not {value[:200]!r}")
    return int(value)
