# SPDX-License-Identifier: Apache-2.0
from pathlib import Path
from typing import Any

from simreg_megatron.data.settings import read_json, section


def manifest_of(data: Path) -> dict[str, Any] | None:
    path = data.parent / "manifest.json"
    manifest = read_json(path)
    return manifest if manifest and data.name in section(manifest, "files", path) else None
