# SPDX-License-Identifier: Apache-2.0
"""Where SimReg's means go: Megatron's log line, TensorBoard with charts of its own, Weights & Biases."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

QUANTILES = {f"simreg margin {share:.0%}": share for share in (0.1, 0.5, 0.9)}
_NOT_IN_CONSOLE = (  # Megatron's line is long enough
    "simreg norm difference",
    "simreg norm difference of rare labels",
    "simreg norm difference of right predictions",
    "simreg radial gradient",
    "simreg effective rank",
    "simreg mean cosine",
    "simreg margin of right predictions",
    *QUANTILES,
)
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
_laid_out: weakref.WeakSet[Any] = weakref.WeakSet()


def add_to_console(means: dict[str, Tensor], total_loss_dict: dict[str, Any], *, skipped: bool) -> None:
    """Put interval means where `training_log` prints its own: it divides every entry by the advanced iterations.

    Some are for TensorBoard and Weights & Biases alone.
    """
    advanced = total_loss_dict.get("advanced iterations", 0) + (0 if skipped else 1)
    for name, value in means.items():
        if name not in _NOT_IN_CONSOLE:
            total_loss_dict[name] = value * max(1, advanced)


def write_scalars(means: dict[str, Tensor], iteration: int) -> None:
    """TensorBoard and Weights & Biases, on the rank where Megatron opened them."""
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    if tensorboard and tensorboard not in _laid_out:
        _laid_out.add(tensorboard)
        tensorboard.add_custom_scalars(layout(means))
    for name, value in means.items():
        if tensorboard:
            tensorboard.add_scalar(name, value, iteration)
        if wandb:
            wandb.log({name: value}, iteration)


def layout(names: Iterable[str]) -> dict[str, dict[str, list[Any]]]:
    """For TensorBoard's tab "Custom Scalars": values that belong together in one chart, beside the language-model loss.

    It takes each name as a regular expression.
    """
    found = {chart: [f"^{name}$" for name in names if belongs(name)] for chart, belongs in _CHARTS.items()}
    if found["losses"]:
        found["losses"].insert(0, "^lm loss$")
    return {"SimReg": {chart: ["Multiline", tags] for chart, tags in found.items() if tags}}
