# SPDX-License-Identifier: Apache-2.0
"""What makes a prepared set what it is: kept beside its parts, and compared before anything is added to them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from simreg_megatron.data.indexed import DataError, whole_file

FORMAT = 1


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """The file is the old one or the new one, whenever the machine stops."""
    with whole_file(path) as stream:
        stream.write((json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())


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
            before, now = _brief(found.get(name)), _brief(wanted.get(name))
            raise DataError(
                f"{folder} was started with other settings ({name}: {before} then, {now} now): "
                "give another --out, the old settings, or remove that folder to start from scratch"
            )


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
