# SPDX-License-Identifier: Apache-2.0
"""The same with atheris, Google's bridge to libFuzzer: it sees the branches taken and the values compared.

libFuzzer leaves by itself when the time is over, so what the run came to is told after every input that counts.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.bar import install, judge
from tests.fuzz.one import Notes, limit_addresses
from tests.fuzz.target import CORPUS, REGRESSIONS, Target

# Parsers in Python that our readers hand the bytes to; those in C are seen by their results alone.
_INSTRUMENTED = ["simreg_megatron", "launch", "yaml", "zipfile", "pickle", "csv", "shlex", "tensorboard.backend"]


def guided(name: str, notes: Notes, seconds: float, seed: int) -> None:
    """Fuzz one target for so long; does not return."""
    import atheris

    with atheris.instrument_imports(include=_INSTRUMENTED):
        from tests.fuzz.readers import TARGETS
    target, start, count, found = TARGETS[name], time.monotonic(), 0, 0
    install()
    folder = Path(tempfile.mkdtemp(prefix="fuzz-")).resolve()
    target.begin(folder)
    for data in (*target.seeds(), b"", b"\0"):  # libraries load their parts late
        judge(target, folder, data)
    limit_addresses()

    def one(data: bytes) -> None:
        nonlocal count, found
        notes.before(data)
        count += 1
        if (finding := judge(target, folder, data)) is not None:
            found += 1
            notes.found(finding, data)

    grown = notes.folder / "corpus"
    grown.mkdir(exist_ok=True)
    kept = [str(place / name) for place in (CORPUS, REGRESSIONS) if (place / name).is_dir()]
    limits = [f"-max_total_time={max(1, int(seconds))}", "-timeout=60", "-rss_limit_mb=0", f"-seed={seed + 1}"]
    limits += [f"-max_len={max(4096, 2 * max(map(len, target.seeds())))}", f"-artifact_prefix={notes.folder}/"]
    atheris.Setup([sys.argv[0], *limits, *_dictionary(target, notes.folder), str(grown), *kept], one)
    try:
        atheris.Fuzz()
    finally:
        print("over", count, found, time.monotonic() - start, flush=True)


def _dictionary(target: Target, folder: Path) -> list[str]:
    """The target's words in libFuzzer's form, which takes none above 64 bytes."""
    words = [word for word in target.words if len(word) <= 64]
    if not words:
        return []
    escaped = ("".join(rf"\x{byte:02x}" for byte in word) for word in words)
    (folder / "words").write_text("".join(f'"{word}"\n' for word in escaped))
    return [f"-dict={folder / 'words'}"]
