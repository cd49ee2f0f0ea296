# SPDX-License-Identifier: Apache-2.0
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simreg_megatron.data.indexed import DataError, whole_file


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    with whole_file(path) as stream:
        stream.write((json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace"))


def read_json(path: Path) -> dict[str, Any] | None:
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
    found = content.get(name, {})
    return found if isinstance(found, dict) else {}
