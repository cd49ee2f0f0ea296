# SPDX-License-Identifier: Apache-2.0
"""What makes a prepared set what it is: kept beside its parts, and compared before anything is added to them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from simreg_megatron.data.indexed import DataError, whole_file

FORMAT = 2
OLDER = 1  # sources had no hash of their ends, and parts did not tell what made them
SOURCES = ("train_sources", "valid_sources")
ENDS = "ends_sha256"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """The file is the old one or the new one, whenever the machine stops."""
    with whole_file(path) as stream:
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        stream.write(text.encode("utf-8", "backslashreplace"))  # half a pair, of a name that is not UTF-8: as in JSON


def read_json(path: Path) -> dict[str, Any] | None:
    """The content; None if there is no such file.

    Raises:
        DataError: it is there and cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): mend that first") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read ({error}): give another --out, or remove what is there") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} is not what this program writes: give another --out, or remove what is there")
    return content


def section(content: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
    """The table `name` in the content of the file at `path`; an empty one where it has none.

    Raises:
        DataError: something else stands there.
    """
    found = content.get(name, {})
    if not isinstance(found, dict):
        raise DataError(f"{path} has {_brief(found)} as {name}, where a table is needed: copy it again, or remove it")
    return found


def refuse_other(found: Mapping[str, Any], wanted: Mapping[str, Any], folder: Path) -> None:
    """Parts of two kinds in one folder would make a set that nobody asked for.

    Raises:
        DataError: naming the first difference.
    """
    for name in dict.fromkeys([*wanted, *found]):
        if found.get(name) != wanted.get(name):
            before, now = map(_brief, _first_difference(found.get(name), wanted.get(name)))
            raise DataError(
                f"{folder} was started with other settings ({name}: {before} then, {now} now): "
                "give another --out, the old settings, or remove that folder to start from scratch"
            )


def _first_difference(before: Any, now: Any) -> tuple[Any, Any]:
    if not (isinstance(before, list) and isinstance(now, list)):
        return before, now
    pairs = (pair for pair in zip_longest(before, now) if pair[0] != pair[1])
    return next(pairs, (before, now))


def fingerprint(settings: Mapping[str, Any], source: Mapping[str, Any]) -> str:
    """What a part depends on: its own source, and all settings but the sources and what is done at a broken line."""
    own = {name: value for name, value in settings.items() if name not in (*SOURCES, "on_error")}
    return hashlib.sha256(json.dumps([own, source], sort_keys=True).encode()).hexdigest()


def changed_sources(before: Any, now: Sequence[Mapping[str, Any]]) -> list[int] | None:
    """Which of the sources were changed under their names; None where they are others, or all of several changed."""
    try:
        if [one["name"] for one in before] != [one["name"] for one in now]:
            return None
    except (LookupError, TypeError):
        return None
    changed = [number for number, one in enumerate(now) if one != before[number]]
    return None if 1 < len(changed) == len(now) else changed


def as_then(settings: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as the version kept them whose settings were found."""
    if found.get("format") != OLDER:
        return dict(settings)
    bare = {name: [{key: one[key] for key in one if key != ENDS} for one in settings[name]] for name in SOURCES}
    return {**settings, "format": OLDER, **bare}


def refuse_older(settings: Mapping[str, Any], parts: Path) -> None:
    """Parts of an older version do not tell which settings made them.

    Raises:
        DataError: these settings are of one.
    """
    if settings.get("format") == OLDER:
        raise DataError(f"an older version began {parts}, and nothing tells what made each: remove it, or name another")


def refuse_anothers(folder: Path, names: Iterable[str]) -> None:
    """Before the first byte is written: files under the names of the set are their owner's.

    Raises:
        DataError: naming the first one.
    """
    for name in names:
        if (folder / name).exists():
            raise DataError(f"{folder / name} is there and not of this command: give another --out, or move it away")


def refuse_changed(folder: Path, manifest: Mapping[str, Any], name: str) -> None:
    """A finished set is not made again, so its files must still be there.

    Raises:
        DataError: naming the first file that is not as the manifest `name` describes it.
    """
    files = section(manifest, "files", folder / name)
    for file in files:
        path, size = folder / file, section(files, file, folder / name).get("bytes")
        if not path.exists() or path.stat().st_size != size:
            raise DataError(f"{path} is not the file that {name} describes: remove {folder}, and it is made again")


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else f"{text[:120]}... ({len(text)} characters)"
