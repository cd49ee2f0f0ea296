# SPDX-License-Identifier: Apache-2.0
"""SimReg for Megatron-LM: pull hidden states of one target token together, push all others apart.

    L_i = CE_i + lambda * softplus( log sum_{j: y_j != y_i} exp(cos(e_i, e_j) / tau)
                                  - log sum_{j: y_j == y_i} exp(cos(e_i, e_j) / tau) )

(arXiv 2605.08809.) Importing this package imports neither torch nor Megatron; `install()` does.
"""

from __future__ import annotations

from typing import Any

from simreg_megatron.config import SimRegConfig
from simreg_megatron.config import __version__ as __version__

__all__ = ["SimRegConfig", "install", "uninstall"]


def install(config: SimRegConfig | None = None, models: Any = None) -> None:
    """Add SimReg to Megatron in this process.

    Call it once, before Megatron parses its flags; the settings then come from the `--simreg-*` flags. In a script
    that never parses Megatron's flags, pass the settings instead: `install(config=SimRegConfig(lambda_=10))`. Calling
    it again with the same `config` changes nothing.

    Args:
        config: the settings, for training loops other than Megatron's own.
        models: the model or the list of model chunks, if already built; checked at once against `config`.

    Raises:
        ValueError: another `config` is installed, `models` lacks a `config`, or a setting has no effect at lambda 0.
        RuntimeError: Megatron has parsed its flags already, without SimReg's, and there is no `config`.
        NotImplementedError: SimReg does not support these models (a bypassed model raises this in its first step).
        MegatronSeamError: this Megatron lacks a function that the plugin must wrap; the message says what to do.
    """
    from simreg_megatron.plugin import hooks

    hooks.install(config, models)


def uninstall() -> None:
    """Restore every Megatron function that `install()` wrapped; RuntimeError if one was wrapped again since."""
    from simreg_megatron.plugin import hooks

    hooks.uninstall()
