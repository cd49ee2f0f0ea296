# SPDX-License-Identifier: Apache-2.0
"""The patches for forks as text: lines added only, without context, each in the README's table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.versions import patches, releases

PATCHES = sorted(patches.FOLDER.glob("*.patch"))
HUNK = re.compile(r"^@@ -(\d+),0 \+(\d+),(\d+) @@$")


def offences(text: str) -> list[str]:
    """Lines of a patch that are neither a header, nor a hunk that only adds, nor an added line as announced."""
    found, left = [], 0
    for line in text.splitlines():
        hunk = HUNK.match(line)
        if left and line.startswith("+"):
            left -= 1
        elif hunk and not left:
            before, after, left = map(int, hunk.groups())
            if after != before + 1:
                found.append(line)
        elif left or not line.startswith(("--- a/", "+++ b/")):
            found.append(line)
    return [*found, *(["a hunk ends early"] if left else [])]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_a_patch_adds_lines_only(patch: Path) -> None:
    text = patch.read_text(encoding="utf-8")
    assert offences(text) == []
    added = [line[1:].strip() for line in text.splitlines() if line.startswith("+ ")]
    scripts = patches.scripts_of(patch)
    assert added.count("simreg_megatron.install()") == added.count("import simreg_megatron") == len(scripts)


def test_every_release_line_has_its_patch() -> None:
    needed = {patches.patch_for(version) for version in (*releases.VERSIONS, "main")}
    assert needed == set(PATCHES)


ENTRIES = {"pretrain_gpt.py": 495, "pretrain_hybrid.py": 441}  # lines of `if __name__ ==` in core_v0.19.0


def pretend_tree(folder: Path, lines_above: int = 0) -> Path:
    """Scripts whose entry points lie where those of core_v0.19.0 do, or further down."""
    for name, entry in ENTRIES.items():
        lines = ["pass"] * (entry - 1 + lines_above) + ['if __name__ == "__main__":', "    pass", ""]
        (folder / name).write_text("\n".join(lines))
    return folder


def test_a_patch_lands_at_the_entry_point_and_stays(tmp_path: Path) -> None:
    tree = pretend_tree(tmp_path)
    patches.check(patches.FOLDER / "core_v0.19.patch", tree)
    assert (tree / "pretrain_gpt.py").read_text().count("simreg_megatron.install()") == 1
