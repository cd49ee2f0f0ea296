# SPDX-License-Identifier: Apache-2.0
"""What the books of an experiment need of a preset in launch/models: its length, and what it reads in a step."""

from __future__ import annotations

from functools import cache

from simreg_megatron.reproduce.dataset import ROOT
from simreg_megatron.reproduce.errors import ReproduceError

_MODELS = ROOT / "launch" / "models"
_TINY = "tiny"


def is_real(size: int | str) -> bool:
    """Whether a size is a preset with the paper's settings; widths, and the tiny preset, have what a search found."""
    return isinstance(size, str) and size != _TINY


@cache
def preset(family: str, name: str) -> dict[str, str]:
    """The preset's flags, without their dashes.

    Raises:
        ReproduceError: there is none of that name.
    """
    path = _MODELS / f"{family}-{name}.args"
    if not path.is_file():
        names = sorted(path.stem.removeprefix(f"{family}-") for path in _MODELS.glob(f"{family}-*.args"))
        raise ReproduceError(f"there is no preset {name} of {family}: choose from {', '.join(names)}")
    lines = (line.partition("#")[0].split() for line in path.read_text(encoding="utf-8").splitlines())
    return {words[0].removeprefix("--"): " ".join(words[1:]) for words in lines if words}
