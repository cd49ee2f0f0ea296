# SPDX-License-Identifier: Apache-2.0
"""Record a start in `OUTPUT/record/TIME[-JOB]`: command, flags, versions, environment, state of the source, job.

Values of variables whose names speak of secrets are left out, and masked in any text that assigns them. A file in the
output folder notes that the run has reached its end.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from launch import checkpoints
from launch.flags import flag_names, flag_number, flag_value
from launch.planned import OF_A_START, OR_NOT_AT_ALL, ROOT, Plan

_SECRET = re.compile(
    r"(?i)KEY|TOKEN|JWT|SECRET|PASS|CRED|AUTH|COOKIE|BEARER|HOOK|PRIVATE|SIGNATURE|SESSION|PSWD|(^|_)(PAT|DSN|PIN|OTP|SAS|PW)(_|$)|_PWD$"
)
_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+(?=@)")  # user:password of an address
_OF_FLAG = re.compile(r"(?im)(--[\w-]*(?:key|token|secret|passw(?:or)?d|pwd|auth)[= ])(.+?)(?= '?--|$)")
_ASSIGNED = re.compile(r"""(')?\b([A-Z][A-Z0-9_]*)=(?(1)[^'\n]*|(?:"[^"\n]*"|'[^'\n]*'|[^\s;"']+)+)""")
_GIT = ("git", "-C", str(ROOT))
_GIT_SECONDS = 20  # a source tree on a slow disk must not hold up a job
ENDED = "ended.json"


def write(plan: Plan, stamp: str, *, environ: Mapping[str, str]) -> Path:
    """Write the record of a start, and return its folder."""
    job = environ.get("SLURM_JOB_ID")
    folder = plan.output / "record" / (f"{stamp}-{job}" if job else stamp)
    folder.mkdir(parents=True, exist_ok=True)
    write_text = functools.partial(Path.write_text, errors="surrogateescape")  # names and paths may be no UTF-8
    write_text(folder / "command.txt", masked(shlex.join([sys.executable, *sys.argv])) + "\n")
    write_text(folder / "flags.txt", "".join(f"{masked(shlex.join(flag))}\n" for flag in plan.flags))
    write_text(folder / "environment.txt", "".join(f"{name}={masked(environ[name])}\n" for name in shown(environ)))
    versions = {dist.metadata["Name"]: dist.version for dist in metadata.distributions()}
    packages = {name: versions[name] for name in sorted(filter(None, versions))}
    of_source = {"script": str(plan.script), "packages": packages, "git": _run([*_GIT, "rev-parse", "HEAD"])}
    (folder / "versions.json").write_text(json.dumps({"python": sys.version, **of_source}, indent=1) + "\n")
    changes = _run([*_GIT, "diff", "HEAD"])
    if changes:
        (folder / "changes.patch").write_text(masked(changes) + "\n")
    if job:
        (folder / "job.sbatch").write_text(masked(_run(["scontrol", "write", "batch_script", job, "-"])) + "\n")
    return folder


def changes_of_flags(plan: Plan) -> list[str]:
    """Compare the flags with those of the last start in this folder; return a notice for the user if some differ."""
    last = max((plan.output / "record").glob("*/flags.txt"), key=lambda path: path.stat().st_mtime, default=None)
    if last is None:
        return []
    before = set(last.read_text(errors="surrogateescape").splitlines())
    now = {masked(shlex.join(flag)) for flag in plan.flags}
    chosen = {*OF_A_START, OR_NOT_AT_ALL, "--exit-duration-in-mins"}  # by the start, or the slice of a job
    names = sorted({line.partition(" ")[0].partition("=")[0] for line in before ^ now} - chosen)
    return [f"flags that differ from the last start of this run: {', '.join(names)} (see {last})"] if names else []


def shown(environ: Mapping[str, str]) -> list[str]:
    """List the variables whose values may be kept."""
    return sorted(name for name in environ if not _SECRET.search(name))


def masked(text: str) -> str:
    """Redact credentials in addresses, flags and variables."""
    text = _OF_FLAG.sub(r"\1***", _IN_ADDRESS.sub("***", text))
    return _ASSIGNED.sub(lambda match: match.expand(r"\1\2=***") if _SECRET.search(match[2]) else match[0], text)


def _run(command: list[str]) -> str:
    """Return what a command prints; a record without it is still a record."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_GIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: {error}"
    return done.stdout.strip() if done.returncode == 0 else ""


def length(plan: Plan) -> str:
    """Name the length that is asked for."""
    for name, unit in (("--train-samples", "sequences"), ("--train-iters", "iterations")):
        value = flag_value(plan.flags, name)
        if value is not None:
            return f"{value} {unit}"
    return "all iterations"


def has_ended(plan: Plan) -> bool:
    """Return whether the run reached the length that is asked for now."""
    try:
        is_as_long = json.loads((plan.output / ENDED).read_text())["length"] == length(plan)
    except (OSError, ValueError, KeyError, TypeError):  # missing, or damaged
        return False
    newest = checkpoints.newest_whole(plan.save or Path())
    # The last ones may have been deleted, and an evaluation alone trains nothing.
    is_back = newest is not None and newest < flag_number(plan.flags, "--train-iters", 0)
    return is_as_long and not is_back and "--skip-train" not in flag_names(plan.flags)


def mark_ended(plan: Plan) -> None:
    if "--skip-train" not in flag_names(plan.flags):
        (plan.output / ENDED).write_text(json.dumps({"length": length(plan)}) + "\n")
