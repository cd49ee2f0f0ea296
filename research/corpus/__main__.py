# SPDX-License-Identifier: Apache-2.0
"""`python -m research.corpus --out data/large`: build the corpus; `apt-get update` as root comes first."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from research.corpus.build import LOCK, build_corpus
from research.corpus.debian import fetch_newest, write_lock
from research.corpus.recipe import PACKAGES
from simreg_megatron.tools.indexed import DataError


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m research.corpus", description=sys.modules[__name__].__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the set")
    parser.add_argument("--packages", type=Path, help="where fetched packages are kept (default: OUT.packages)")
    text = "first pin the versions that the archive has today: they make another corpus"
    parser.add_argument("--update-lock", action="store_true", help=text)
    options = parser.parse_args(argv)
    packages = options.packages or options.out.with_name(f"{options.out.name}.packages")
    try:
        if options.update_lock:
            write_lock(LOCK, [fetch_newest(name, packages) for name in PACKAGES])
        manifest = build_corpus(options.out, packages, workers=len(os.sched_getaffinity(0)))
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for side, tokens in manifest["tokens"].items():
        print(
            f"{options.out / side}: {tokens:,} tokens, {manifest['bytes_per_token'][side]:.4f} bytes of text for each"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
