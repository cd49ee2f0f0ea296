# SPDX-License-Identifier: Apache-2.0
"""From sources of text to parts, by many processes, on one machine or several; and on one, to the whole set.

Documents keep the order of the sources, whichever process tokenizes them. A stopped run, once restarted, continues with
the blocks that have no part yet, and gives the same bytes.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from simreg_megatron.data.assemble import SETS, alone, assemble, store_of
from simreg_megatron.data.begin import begin, is_done, settings_of
from simreg_megatron.data.blocks import Block
from simreg_megatron.data.budget import Reckoning
from simreg_megatron.data.encoding import describe_tokenizer
from simreg_megatron.data.indexed import DataError, explain
from simreg_megatron.data.parts import PartHeader, PartStore
from simreg_megatron.data.settings import fingerprint
from simreg_megatron.data.sources import Input
from simreg_megatron.data.task import Progress, Silent, Task, inputs_of
from simreg_megatron.data.work import Recipe, start_worker, work

_PATIENCE = 60.0  # seconds for the settings: who holds them reads and writes a few lines


def prepare(task: Task, progress: Progress | None = None) -> dict[str, Any] | None:
    """Make the set, or this shard's parts of it, or find it there.

    Returns:
        The manifest; None after a shard, whose parts `assemble` will join.

    Raises:
        DataError: one sentence with the cause and the fix; finished parts are kept, and the same call continues.
    """
    try:
        task.output.mkdir(parents=True, exist_ok=True)
        index, count = task.shard
        with alone(task.output, f"{index + 1}-of-{count}"):
            return _prepare(task, progress or Silent())
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
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}: give the --out of the shards")
    try:
        return assemble(folder, budget=budget)
    except OSError as error:
        raise DataError(explain(error, folder)) from error


def _prepare(task: Task, progress: Progress) -> dict[str, Any] | None:
    from filelock import FileLock

    recipe = Recipe(describe_tokenizer(task.tokenizer), task.key, task.bos, task.valid_share, task.on_error)
    if task.bos == "document" and recipe.tokenizer.bos_id is None:
        raise DataError(f"--bos document: the tokenizer {task.tokenizer} has no begin-of-text token")
    inputs = inputs_of(task, progress.tell)
    settings = settings_of(task, recipe.tokenizer, inputs)
    with FileLock(task.output / ".prepare-settings.lock", timeout=_PATIENCE):  # shards may start at the same moment
        if is_done(task, settings):
            return assemble(task.output)
        begin(task, settings, recipe.tokenizer, progress)
    for source_set in SETS:
        if inputs[source_set]:
            side = recipe if source_set == "train" else Recipe(recipe.tokenizer, task.key, task.bos, 0.0, task.on_error)
            made_with = [fingerprint(settings, source) for source in settings[f"{source_set}_sources"]]
            _make_parts(task, source_set, side, inputs[source_set], made_with, progress)
    return assemble(task.output, budget=task.budget) if task.shard[1] == 1 else None


def _make_parts(
    task: Task, source_set: str, recipe: Recipe, inputs: list[Input], made_with: list[str], progress: Progress
) -> None:
    """All parts of a set of sources that this machine owes and that are not there yet."""
    store = store_of(task.output, source_set)
    sizes = [one.size for one in inputs]
    reckoning = Reckoning(task.budget[source_set], sizes, shards=task.shard[1])
    _count_what_is_there(store, made_with, reckoning)
    progress.begin(source_set, reckoning)
    spawn = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    with ProcessPoolExecutor(task.workers, mp_context=spawn, initializer=start_worker, initargs=(recipe,)) as pool:
        pending: dict[Future[PartHeader], tuple[int, Block]] = {}
        try:
            for number, block in _owed(task, inputs, store, reckoning):
                future = pool.submit(work, block, store.path(number, block.number), made_with[number])
                pending[future] = number, block
                while len(pending) > task.workers + 1:  # memory holds one block more than is worked on
                    _harvest(pending, reckoning, progress)
            while pending:
                _harvest(pending, reckoning, progress)
        except BrokenProcessPool:
            raise DataError(
                "a worker was killed, perhaps because memory ran out: give the same command again, with fewer "
                f"--workers; all complete parts are kept{_suspect([block for _, block in pending.values()])}"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _suspect(blocks: list[Block]) -> str:
    places = " or ".join(block.where(0) for block in blocks[:4])
    return places and (
        f"; if this comes again, look from {places} on for one very long document, which takes about 25 times its "
        "size in memory, and cut it up"
    )


def _count_what_is_there(store: PartStore, made_with: list[str], reckoning: Reckoning) -> None:
    for number, fitting in enumerate(made_with):
        for block in store.known(number):
            reckoning.add(number, block, store.header(number, block, fitting))


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
        number, block = pending[future]
        if future.exception() is not None:
            failed.append((number, block.number, future))  # and stays among the pending, to be named
        else:
            reckoning.add(number, block.number, future.result())
            del pending[future]
    progress.update()
    if failed:
        min(failed, key=lambda one: one[:2])[2].result()


def workers_here() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))
