# SPDX-License-Identifier: Apache-2.0
"""Build a corpus of some forty million tokens of English from Debian's documentation packages.

Packages, pinned by a lock -> prose of their files -> pages without repeats -> train, valid and test by the hash of each
page -> a tokenizer trained on the first -> .bin/.idx. The same lock gives the same bytes. The corpus is built in a
folder of another name, which is renamed when it is whole.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from research.corpus.debian import Package, fetch, read_files, read_lock
from research.corpus.pages import SIDES, make_pages
from research.corpus.prose import Block
from research.corpus.readers import read_page
from simreg_megatron import __version__
from simreg_megatron.tools import tokens
from simreg_megatron.tools.builtin_corpus import write_pair
from simreg_megatron.tools.tokens import ENDINGS, DataError, describe_files, find_changed

FORMAT = 1  # of the readers and rules: others make another corpus of the same packages
VOCAB_SIZE = 8192
LOCK = Path(__file__).with_name("lock.json")


def build_corpus(out: Path, packages: Path) -> dict[str, Any]:
    """Build the corpus in the folder `out`, or find it there, and return its manifest.

    Args:
        out: train, valid and test .bin/.idx, tokenizer.model and manifest.json.
        packages: where the fetched packages are kept.

    Raises:
        DataError: a package cannot be fetched or is not the lock's, or `out` holds something else.
    """
    pinned = read_lock(LOCK)
    inputs = [(package.name, package.sha256, package.read) for package in pinned]
    fingerprint = hashlib.sha256(json.dumps([FORMAT, VOCAB_SIZE, inputs]).encode()).hexdigest()
    if out.exists():
        return _existing(out, fingerprint)
    work = out.with_name(f"{out.name}.building")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    print(f"> fetching and reading {len(pinned)} packages (some minutes)", flush=True)
    left_out: Counter[str] = Counter()
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        files = (file for of_package in pool.map(partial(_prose_of, cache=packages), pinned) for file in of_package)
        pages = sorted(make_pages(files, left_out), key=lambda page: page.key)
    texts = {side: [page.text for page in pages if page.side == side] for side in SIDES}
    print(f"> training a tokenizer of {VOCAB_SIZE} pieces, then tokenizing", flush=True)
    tokens.train_tokenizer(texts["train"], work / "tokenizer.model", vocab_size=VOCAB_SIZE)
    counts = {side: write_pair(work / side, texts[side], work / "tokenizer.model") for side in SIDES}
    utf8_bytes = {side: sum(len(text.encode()) for text in texts[side]) for side in SIDES}
    characters: Counter[str] = Counter()
    for page in pages:
        characters[page.package] += len(page.text)
    manifest = {  # under the names that `data prepare` uses
        "format": FORMAT,
        "made_by": f"simreg-megatron {__version__}",
        "documents": {side: counts[side][0] for side in SIDES},
        "tokens": {side: counts[side][1] for side in SIDES},
        "characters": {side: sum(map(len, texts[side])) for side in SIDES},
        "utf8_bytes": utf8_bytes,
        # The text's bytes for each token, end-of-text among the tokens: bits a byte are bits a token divided by this.
        "bytes_per_token": {side: utf8_bytes[side] / counts[side][1] for side in SIDES},
        "left_out": dict(left_out),
        **tokens.load_tokenizer(str(work / "tokenizer.model")).describe(),
        "libraries": {name: importlib.metadata.version(name) for name in ("lxml", "numpy", "sentencepiece")},
        "python": platform.python_version(),
        "files": describe_files(work, [*(f"{side}{end}" for side in SIDES for end in ENDINGS), "tokenizer.model"]),
        "fingerprint": fingerprint,
        "packages": [{**asdict(one), "characters": characters[one.name]} for one in pinned],
    }
    (work / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    work.rename(out)
    return manifest


def _existing(out: Path, fingerprint: str) -> dict[str, Any]:
    path = out / "manifest.json"
    manifest: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    if manifest.get("fingerprint") != fingerprint:
        raise DataError(f"{out} is there and is not this corpus: give another --out, or remove it")
    if changed := find_changed(out, manifest):
        raise DataError(f"{changed} is not the file that {path.name} describes: remove {out}, and build it again")
    return manifest


def _prose_of(package: Package, *, cache: Path) -> list[tuple[str, list[Block]]]:
    """Return name and prose of each file of a package that has some."""
    files = read_files(fetch(package, cache), package.read)
    pages = ((f"{package.name}/{name.removeprefix('./')}", read_page(name, data)) for name, data in files)
    return [(name, blocks) for name, blocks in pages if blocks]
