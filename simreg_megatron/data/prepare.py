# SPDX-License-Identifier: Apache-2.0
"""From sources of text to parts, by many processes, on one machine or several; and on one, to the whole set.

Documents keep the order of the sources, whichever process tokenizes them. A stopped run, once restarted, continues with
the blocks that have no part yet, and gives the same bytes.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from simreg_megatron.data.assemble import MANIFEST, SETS, SETTINGS, assemble, remove_parts, store_of
from simreg_megatron.data.blocks import Block
from simreg_megatron.data.budget import Reckoning
from simreg_megatron.data.encoding import describe_tokenizer
from simreg_megatron.data.indexed import DataError, explain
from simreg_megatron.data.pairs import ENDINGS
from simreg_megatron.data.parts import SIDES, PartHeader, PartStore
from simreg_megatron.data.settings import FORMAT, read_json, refuse_anothers, refuse_other, section, write_json
from simreg_megatron.data.sources import Input, find_inputs
from simreg_megatron.data.work import BOS_POLICIES, ERROR_POLICIES, Recipe, start_worker, work

BLOCK_BYTES = 32 << 20
_BUSY = "another process is preparing this data set in {}: wait for it, or stop it"


@dataclass(frozen=True)
class Task:
    """What is asked for.

    Args:
        sources: words as on the command line: files, folders, `hf:NAME[:CONFIGURATION]`, `c4`.
        output: folder of the set.
        tokenizer: a sentencepiece .model file, or a Hugging Face folder or name.
        valid_sources: for the validation set alone; without them it is `valid_share` of the documents.
        tokens, valid_tokens: the sets end with the document that reaches them; None takes all.
        shard: (i, n): make only the parts of machine i of n, counted from 0.
        block_bytes: about so much text a part.
    """

    sources: Sequence[str]
    output: Path
    tokenizer: str
    valid_sources: Sequence[str] = ()
    valid_share: float = 0.0
    tokens: int | None = None
    valid_tokens: int | None = None
    key: str = "text"
    bos: str = "none"
    on_error: str = "stop"
    workers: int = 1
    shard: tuple[int, int] = (0, 1)
    block_bytes: int = BLOCK_BYTES

    def __post_init__(self) -> None:
        for name, value, known in (("bos", self.bos, BOS_POLICIES), ("on-error", self.on_error, ERROR_POLICIES)):
            if value not in known:
                raise DataError(f"--{name} takes {' or '.join(known)}, not {value!r}")
        if not 0 <= self.valid_share < 1:
            raise DataError(f"--valid-share takes a share of the documents from 0 to below 1, not {self.valid_share}")
        if self.valid_share and self.valid_sources:
            raise DataError("--valid and --valid-share both make the validation set: give one")
        index, count = self.shard
        if not 0 <= index < count:
            raise DataError(f"--shard takes i/n with i from 1 to n, not {index + 1}/{count}")
        for name, number in (("workers", self.workers), ("tokens", self.tokens), ("valid-tokens", self.valid_tokens)):
            if number is not None and number < 1:
                raise DataError(f"--{name} takes a positive number, not {number}")
        if self.valid_tokens and not self.valid_sources:
            raise DataError("--valid-tokens goes with --valid: otherwise --valid-share sets the size of the set")

    @property
    def budget(self) -> dict[str, int | None]:
        return {"train": self.tokens, "valid": self.valid_tokens}


class Progress(Protocol):
    """Told of what is there and what comes."""

    def begin(self, name: str, reckoning: Reckoning) -> None: ...

    def update(self) -> None: ...


class _Silent:
    def begin(self, name: str, reckoning: Reckoning) -> None:
        pass

    def update(self) -> None:
        pass


def prepare(task: Task, progress: Progress | None = None) -> dict[str, Any] | None:
    """Make the set, or this shard's parts of it, or find it there.

    Returns:
        The manifest; None after a shard, whose parts `assemble` will join.

    Raises:
        DataError: one sentence with the cause and the fix; finished parts are kept, and the same call continues.
    """
    from filelock import FileLock, Timeout

    try:
        task.output.mkdir(parents=True, exist_ok=True)
        index, count = task.shard
        with FileLock(task.output / f".prepare-{index + 1}-of-{count}.lock", timeout=0):
            return _prepare(task, progress or _Silent())
    except Timeout:
        raise DataError(_BUSY.format(task.output)) from None
    except OSError as error:
        raise DataError(explain(error, task.output)) from error


def merge(folder: Path, budget: dict[str, int | None] | None = None) -> dict[str, Any]:
    """Join the parts of all shards in a folder.

    Args:
        folder: the output of every shard, or the folder into which their parts were copied.
        budget: the most training and validation tokens; for a side without a number the shards' own.

    Raises:
        DataError: as of `assemble`.
    """
    from filelock import FileLock, Timeout

    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}: give the --out of the shards")
    try:
        with FileLock(folder / ".prepare-merge.lock", timeout=0):
            return assemble(folder, budget=budget)
    except Timeout:
        raise DataError(_BUSY.format(folder)) from None
    except OSError as error:
        raise DataError(explain(error, folder)) from error


def _prepare(task: Task, progress: Progress) -> dict[str, Any] | None:
    recipe = Recipe(describe_tokenizer(task.tokenizer), task.key, task.bos, task.valid_share, task.on_error)
    if task.bos == "document" and recipe.tokenizer.bos_id is None:
        raise DataError(f"--bos document: the tokenizer {task.tokenizer} has no begin-of-text token")
    inputs = {"train": find_inputs(task.sources), "valid": find_inputs(task.valid_sources, split="validation")}
    settings = _settings(task, recipe, inputs)
    done = read_json(task.output / MANIFEST)
    if done is not None:
        own = section(done, "settings", task.output / MANIFEST)
        refuse_other(_also_skipping(own, task), settings, task.output)
        refuse_other(section(done, "budget", task.output / MANIFEST), task.budget, task.output)
        remove_parts(task.output)
        return done
    begun = read_json(task.output / SETTINGS)
    if begun is not None:
        own = section(begun, "settings", task.output / SETTINGS)
        refuse_other(_also_skipping(own, task), settings, task.output)
    else:
        refuse_anothers(task.output, (f"{side}{ending}" for side in SIDES for ending in ENDINGS))
    (task.output / SETTINGS).parent.mkdir(exist_ok=True)
    told = {"dtype": recipe.tokenizer.dtype, "tokenizer_name": recipe.tokenizer.name}
    write_json(task.output / SETTINGS, {"settings": settings, "budget": task.budget, **told})
    for source_set in SETS:
        if inputs[source_set]:
            side = recipe if source_set == "train" else Recipe(recipe.tokenizer, task.key, task.bos, 0.0, task.on_error)
            _make_parts(task, source_set, side, inputs[source_set], progress)
    return assemble(task.output, budget=task.budget) if task.shard[1] == 1 else None


def _settings(task: Task, recipe: Recipe, inputs: dict[str, list[Input]]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "tokenizer": recipe.tokenizer.identity(),
        "key": task.key,
        "eos": "document",
        "bos": task.bos,
        "valid_share": task.valid_share,
        "on_error": task.on_error,
        "block_bytes": task.block_bytes,
        **{f"{source_set}_sources": [one.identity() for one in inputs[source_set]] for source_set in SETS},
    }


def _also_skipping(found: dict[str, Any], task: Task) -> dict[str, Any]:
    """Parts that were made without leaving anything out are what skipping would have made, too."""
    return found | {"on_error": task.on_error} if found.get("on_error") == "stop" else found


def _make_parts(task: Task, source_set: str, recipe: Recipe, inputs: list[Input], progress: Progress) -> None:
    """All parts of a set of sources that this machine owes and that are not there yet."""
    store = store_of(task.output, source_set)
    sizes = [one.size for one in inputs]
    reckoning = Reckoning(task.budget[source_set], sizes, shards=task.shard[1])
    _count_what_is_there(store, len(inputs), reckoning)
    progress.begin(source_set, reckoning)
    spawn = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    with ProcessPoolExecutor(task.workers, mp_context=spawn, initializer=start_worker, initargs=(recipe,)) as pool:
        pending: dict[Future[PartHeader], tuple[int, Block]] = {}
        try:
            for number, block in _owed(task, inputs, store, reckoning):
                pending[pool.submit(work, block, store.path(number, block.number))] = number, block
                while len(pending) > task.workers + 1:  # memory holds one block more than is worked on
                    _harvest(pending, reckoning, progress)
            while pending:
                _harvest(pending, reckoning, progress)
        except BrokenProcessPool:
            raise DataError(
                "a worker was killed, perhaps because memory ran out: give the same command again, with fewer "
                "--workers; all complete parts are kept"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _count_what_is_there(store: PartStore, num_inputs: int, reckoning: Reckoning) -> None:
    for number in range(num_inputs):
        for block in store.known(number):
            reckoning.add(number, block, store.header(number, block))


def _owed(task: Task, inputs: list[Input], store: PartStore, reckoning: Reckoning) -> Iterator[tuple[int, Block]]:
    index, count = task.shard
    for number, one in enumerate(inputs):
        if reckoning.is_whole(number):
            continue
        if not one.shared and number % count != index:
            continue

        def wanted(block: int, number: int = number, shared: bool = one.shared) -> bool:
            mine = not shared or (number + block) % count == index
            return mine and not store.has(number, block)

        for block in one.blocks(task.block_bytes, wanted):
            if reckoning.is_enough(number, block):
                return
            yield number, block


def _harvest(pending: dict[Future[PartHeader], tuple[int, Block]], reckoning: Reckoning, progress: Progress) -> None:
    """Wait for some work to end; of several that failed, the first in the text's order is told."""
    done = wait(pending, timeout=1.0, return_when=FIRST_COMPLETED).done
    failed = []
    for future in done:
        number, block = pending.pop(future)
        if future.exception() is not None:
            failed.append((number, block.number, future))
        else:
            reckoning.add(number, block.number, future.result())
    progress.update()
    if failed:
        min(failed, key=lambda one: one[:2])[2].result()


def workers_here() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))
