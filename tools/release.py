# SPDX-License-Identifier: Apache-2.0
"""`python tools/release.py --tag vX.Y.Z --notes FILE`: may this be released under that name, and what is new in it?

The package, CITATION.cff and the changelog must tell the same version. The notes are the changelog's part on it. Needs
no package of others.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_VERSION = re.compile(r"v(\d+\.\d+\.\d+(?:rc\d+)?)")


class NotReady(ValueError):
    """One sentence on what is missing."""


def notes(tag: str, root: Path = ROOT) -> str:
    """Return the changelog's part on the version of the tag.

    Raises:
        NotReady: the tag is no version, or one of the three places has another.
    """
    found = _VERSION.fullmatch(tag)
    if found is None:
        raise NotReady(f"{tag} is not a version: a tag is v, three numbers with dots, and rcN for a candidate")
    version = found[1]
    for name, pattern in (
        ("simreg_megatron/config/__init__.py", r'__version__ = "(.+)"'),
        ("CITATION.cff", r"version: (.+)"),
    ):
        stated = re.search(f"(?m)^{pattern}$", (root / name).read_text(encoding="utf-8"))
        if stated is None or stated[1] != version:
            raise NotReady(
                f"{name} says {stated[1] if stated else 'no version'}, and the tag {tag}: change one of them"
            )
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    part = re.search(rf"(?ms)^## \[{re.escape(version)}\][^\n]*\n(.*?)(?=^## |\Z)", changelog)
    if part is None or not part[1].strip():
        raise NotReady(f"CHANGELOG.md has no part `## [{version}] - DATE`: rename the one on what is not yet released")
    return part[1].strip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", required=True, help="such as v0.1.0")
    parser.add_argument("--notes", type=Path, required=True, help="the file to write them to")
    options = parser.parse_args()
    try:
        options.notes.write_text(notes(options.tag), encoding="utf-8")
    except NotReady as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
