# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.fuzz.one TARGET FOLDER SECONDS [--plain]`: one target in a process that may die of it.

FOLDER keeps `outcome.json`, the findings with their inputs, and `current`, the input that was being read.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import resource
from pathlib import Path
from typing import Any

from tests.fuzz.bar import Finding
from tests.fuzz.target import Target

_ROOM = 8 << 30  # bytes of addresses beyond those of the libraries, so that no reader takes the machine with it
CURRENT, OUTCOME = "current", "outcome.json"


class Notes:
    """What a run leaves in its folder, complete after each input."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / OUTCOME).unlink(missing_ok=True)
        self._current = (folder / CURRENT).open("wb", buffering=0)
        self._keys: set[str] = set()

    def before(self, data: bytes) -> None:
        self._current.seek(0)
        self._current.truncate()
        self._current.write(data)

    def found(self, finding: Finding, data: bytes) -> None:
        if finding.key in self._keys:
            return
        self._keys.add(finding.key)
        name = f"{finding.kind}-{hashlib.sha256(data).hexdigest()[:12]}"
        (self.folder / name).write_bytes(data)
        with (self.folder / "findings.txt").open("a", encoding="utf-8") as stream:
            stream.write(f"{name}: {' '.join(finding.says.split())}\n")

    def ended(self, outcome: dict[str, Any]) -> None:
        (self.folder / OUTCOME).write_text(json.dumps(outcome))
        (self.folder / CURRENT).unlink()


def limit_addresses() -> None:
    with open("/proc/self/statm") as stream:
        pages = int(stream.read().split()[0])
    limit = pages * resource.getpagesize() + _ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def plainly(target: Target, notes: Notes, seconds: float, seed: int) -> None:
    from tests.fuzz.loop import fuzz

    limit_addresses()
    outcome = fuzz(target, seconds=seconds, seed=seed, before=notes.before)
    for finding, data in outcome.findings.values():
        notes.found(finding, data)
    told = {"inputs": outcome.inputs, "seconds": outcome.seconds, "covered": outcome.covered, "engine": "plain"}
    notes.ended(told | {"findings": len(outcome.findings)})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("folder", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.plain or importlib.util.find_spec("atheris") is None:
        from tests.fuzz.readers import TARGETS

        plainly(TARGETS[options.target], Notes(options.folder), options.seconds, options.seed)
    else:
        from tests.fuzz.guided import guided

        guided(options.target, Notes(options.folder), options.seconds, options.seed)


if __name__ == "__main__":
    main()
