# SPDX-License-Identifier: Apache-2.0
"""Values that belong together in one chart of TensorBoard's tab "Custom Scalars"."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

_CHARTS: dict[str, Callable[[str], bool]] = {
    "losses": lambda name: name.endswith(" loss"),
    "cosines": lambda name: name.endswith(" cosine"),
    "margins of predictions": lambda name: " margin" in name,
    "isotropy": lambda name: name == "simreg isotropy",
    "norms by label": lambda name: "norm difference" in name,
    "lambda": lambda name: name.endswith(" lambda"),
    "clipping": lambda name: name.startswith("adagc"),
}
"""What stands in one chart. The rest has charts of its own anyway."""


def layout(names: Iterable[str]) -> dict[str, dict[str, list[Any]]]:
    """As `SummaryWriter.add_custom_scalars` takes it, each name a regular expression; language-model loss included."""
    found = {chart: [f"^{name}$" for name in names if belongs(name)] for chart, belongs in _CHARTS.items()}
    if found["losses"]:
        found["losses"].insert(0, "^lm loss$")
    return {"SimReg": {chart: ["Multiline", tags] for chart, tags in found.items() if tags}}
