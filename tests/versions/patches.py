# SPDX-License-Identifier: Apache-2.0
"""The patches for forks: which belongs to which tree, what it adds, and where it lands."""

import re
import subprocess
from pathlib import Path

from tests.versions.processes import ROOT
from tests.versions.releases import line_of

FOLDER = ROOT / "patches"
_ENTRY = re.compile(r"""^if __name__ == ['"]__main__['"]:$""")
_CALL = "simreg_megatron.install()"


class PatchError(AssertionError):
    """A patch does not do what patches/README.md says."""


def patch_for(version: str) -> Path:
    """The patch of a version's release line: 0.13.1 -> core_v0.13.patch."""
    return FOLDER / ("main.patch" if version == "main" else f"core_v{line_of(version)}.patch")


def apply(patch: Path, tree: Path, *, reverse: bool = False) -> None:
    command = ["git", "apply", "--unidiff-zero", *(["--reverse"] if reverse else []), str(patch)]
    # Its own GIT_DIR keeps git from taking the tree for a part of the repository around it.
    env = {"GIT_DIR": str(tree / "no-repository"), "PATH": "/usr/local/bin:/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    if done.returncode:
        raise PatchError(f"{patch.name} does not apply: {done.stderr.strip()}")


def scripts_of(patch: Path) -> list[str]:
    return re.findall(r"^\+\+\+ b/(.+)$", patch.read_text(encoding="utf-8"), flags=re.MULTILINE)


def check(patch: Path, tree: Path) -> None:
    """Apply the patch to `tree`; PatchError unless it adds lines at the entry point alone, and comes off."""
    before = {name: (tree / name).read_text(encoding="utf-8") for name in scripts_of(patch)}
    apply(patch, tree)
    for name, text in before.items():
        after = (tree / name).read_text(encoding="utf-8")
        _require_lines_at_entry(name, text.splitlines(), after.splitlines())
        compile(after, name, "exec")  # hybrid models need a GPU: their script is read, not run
    apply(patch, tree, reverse=True)
    if any((tree / name).read_text(encoding="utf-8") != text for name, text in before.items()):
        raise PatchError(f"{patch.name} does not come off")
    apply(patch, tree)


def _require_lines_at_entry(name: str, before: list[str], after: list[str]) -> None:
    entry = next(index for index, line in enumerate(before) if _ENTRY.match(line)) + 1
    added = len(after) - len(before)
    if added <= 0 or before[:entry] != after[:entry] or before[entry:] != after[entry + added :]:
        raise PatchError(f"{name}: not lines added below `if __name__ ==` alone")
    if _CALL not in (line.strip() for line in after[entry : entry + added]):
        raise PatchError(f"{name}: the added lines do not call {_CALL}")
