# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.fuzz.attacks`: inputs that people thought of, each of which broke a reader before it was mended.

They are kept among the regressions beside those that the fuzzer found, under the name of what they do.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

from tests.fuzz.target import REGRESSIONS


def main() -> None:
    for target, name, content in _attacks():
        (REGRESSIONS / target).mkdir(parents=True, exist_ok=True)
        (REGRESSIONS / target / name).write_bytes(content)
        print(f"{target}/{name}: {len(content):,} bytes")


def _attacks() -> Iterator[tuple[str, str, bytes]]:
    yield "common-pickle", "bytearray-of-256-MiB", b"\x80\x02cbuiltins\nbytearray\nJ\x00\x00\x00\x10\x85R."
    yield "manifest", "deep", b'{"files":' + b"[" * 20_000
    yield "manifest", "vocabulary-of-words", b'{"files": {"train.bin": {"bytes": 10}}, "vocab_size": "many"}'
    yield "manifest", "vocabulary-without-end", b'{"vocab_size": 100000000}'
    yield "manifest", "files-in-a-list", b'{"files": ["train.bin"]}'
    yield "zstandard", "zeros", _zeros(256 << 20)
    yield "plan-yaml", "merges", _merges()
    yield "plan-yaml", "aliases", _aliases()
    yield "plan-yaml", "combinations", _combinations()
    yield "plan-yaml", "date-of-no-day", b"2001-99-99"
    yield "plan-yaml", "half-a-word", b'name: x\nquestion: "\\ud800"\narms: {a: {trials: {lr: 3}}}\n'
    yield "plan-yaml", "flag-of-a-number", b"name: x\nquestion: y\narms: {a: {flags: [1]}}\n"
    yield "plan-yaml", "seeds-of-words", b"name: x\nquestion: y\nseeds: three\narms: {a: {}}\n"
    yield (
        "plan-json",
        "seeds-without-end",
        json.dumps({"name": "small", "question": "?", "arms": {"plain": {}}, "seeds": 10**7, "sizes": [64]}).encode(),
    )
    yield "cluster-env", "number-of-5000-digits", b"GPUS_PER_NODE=" + b"9" * 5000
    yield "run-csv", "step-beyond-64-bits", b"tag,step,value\nlm loss,99999999999999999999,1\n"
    yield "run-csv", "more-cells-than-heads", b"step,lm loss\n1,2,3\n"


def _zeros(size: int) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=19).compress(bytes(size))


def _merges() -> bytes:
    """Each mapping takes over the one before nine times."""
    names = "abcdefgh"
    lines = ["a: &a {x: 1}"]
    for before, name in itertools.pairwise(names):
        lines.append(f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 9)}]}}")
    return "\n".join(lines).encode()


def _aliases() -> bytes:
    """A flag whose text is nine times nine times ... a list."""
    lines = ["name: x", "question: y", "source:", "  - &a [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"  - &{name} [{', '.join([f'*{chr(ord(name) - 1)}'] * 9)}]" for name in "bcdefgh"]
    return "\n".join([*lines, "arms: {one: {flags: {lr: *h}}}"]).encode()


def _combinations() -> bytes:
    values = ", ".join(map(str, range(10)))
    flags = "".join(f"\n      flag-{number}: [{values}]" for number in range(9))
    return f"name: x\nquestion: y\narms:\n  one:\n    trials:{flags}\n".encode()


if __name__ == "__main__":
    main()
