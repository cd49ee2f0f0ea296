# SPDX-License-Identifier: Apache-2.0
"""`python -m research.corpus --out data/large`: build the corpus; `apt-get update` as root comes first."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from research.corpus.build import build_corpus
from simreg_megatron.tools.tokens import DataError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m research.corpus", description=sys.modules[__name__].__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the set")
    parser.add_argument("--packages", type=Path, help="where fetched packages are kept (default: OUT.packages)")
    options = parser.parse_args()
    try:
        manifest = build_corpus(options.out, options.packages or options.out.with_name(f"{options.out.name}.packages"))
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for side, tokens in manifest["tokens"].items():
        size = manifest["bytes_per_token"][side]
        print(f"{options.out / side}: {tokens:,} tokens, {size:.4f} bytes of text for each")
    return 0


if __name__ == "__main__":
    sys.exit(main())
