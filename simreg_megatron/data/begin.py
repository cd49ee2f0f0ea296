# SPDX-License-Identifier: Apache-2.0
"""Before the first part: what the folder holds of an earlier start, and whether the work goes on from there."""

from __future__ import annotations

from typing import Any

from simreg_megatron.data.assemble import MANIFEST, SETS, SETTINGS, store_of
from simreg_megatron.data.encoding import TokenizerFacts
from simreg_megatron.data.pairs import ENDINGS
from simreg_megatron.data.parts import SIDES
from simreg_megatron.data.settings import (
    FORMAT,
    as_then,
    changed_sources,
    read_json,
    refuse_anothers,
    refuse_older,
    refuse_other,
    section,
    write_json,
)
from simreg_megatron.data.sources import Input
from simreg_megatron.data.task import Progress, Task


def settings_of(task: Task, tokenizer: TokenizerFacts, inputs: dict[str, list[Input]]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "tokenizer": tokenizer.identity(),
        "key": task.key,
        "eos": "document",
        "bos": task.bos,
        "valid_share": float(task.valid_share),
        "on_error": task.on_error,
        "block_bytes": task.block_bytes,
        **{f"{source_set}_sources": [one.identity() for one in inputs[source_set]] for source_set in SETS},
    }


def is_done(task: Task, settings: dict[str, Any]) -> bool:
    """Whether the set is there.

    Raises:
        DataError: another is.
    """
    done = read_json(task.output / MANIFEST)
    if done is None:
        return False
    own = section(done, "settings", task.output / MANIFEST)
    refuse_other(_also_skipping(own, task), as_then(settings, own), task.output)
    refuse_other(section(done, "budget", task.output / MANIFEST), task.budget, task.output)
    return True


def begin(task: Task, settings: dict[str, Any], tokenizer: TokenizerFacts, progress: Progress) -> None:
    """Keep the settings beside the parts, or see that they are those of the parts that are there.

    Raises:
        DataError: something else is there.
    """
    path = task.output / SETTINGS
    begun = read_json(path)
    if begun is None:
        refuse_anothers(task.output, (f"{side}{ending}" for side in SIDES for ending in ENDINGS))
        others = path.parent.iterdir() if path.parent.is_dir() else ()
        refuse_anothers(path.parent, (one.name for one in others if not one.name.startswith(f"{path.name}.writing-")))
    else:
        own = section(begun, "settings", path)
        refuse_older(own, path.parent)
        _drop_changed(task, own, settings, progress)
    path.parent.mkdir(exist_ok=True)
    told = {"dtype": tokenizer.dtype, "tokenizer_name": tokenizer.name}
    write_json(path, {"settings": settings, "budget": task.budget, **told})


def _drop_changed(task: Task, own: dict[str, Any], settings: dict[str, Any], progress: Progress) -> None:
    """Remove the parts of sources that were mended after the work began, if all else is as it was."""
    names = [f"{source_set}_sources" for source_set in SETS]
    changed = {name: changed_sources(own.get(name), settings[name]) for name in names}
    same = {name: settings[name] for name in names if changed[name] is not None}
    refuse_other(_also_skipping(own, task) | same, settings, task.output)
    for source_set, name in zip(SETS, names, strict=True):
        for number in changed[name] or ():
            progress.tell(f"{settings[name][number]['name']} has changed: what was made of it is made again")
            store_of(task.output, source_set).drop(number)


def _also_skipping(found: dict[str, Any], task: Task) -> dict[str, Any]:
    """Parts that were made without leaving anything out are what skipping would have made, too."""
    return found | {"on_error": task.on_error} if found.get("on_error") == "stop" else found
