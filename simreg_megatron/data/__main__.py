# SPDX-License-Identifier: Apache-2.0
"""`python -m simreg_megatron.data DIRECTORY`: build the corpus there, or say that it is there, and sum it up."""

import sys
from pathlib import Path

from rich import print_json

from simreg_megatron.data import DataError, ensure_builtin_corpus


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m simreg_megatron.data DIRECTORY")
    try:
        corpus = ensure_builtin_corpus(Path(sys.argv[1]))
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print_json(data=corpus.manifest)


if __name__ == "__main__":
    main()
