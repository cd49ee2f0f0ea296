# SPDX-License-Identifier: Apache-2.0
"""SimReg for Megatron-LM: pull hidden states of one target token together, push all others apart.

    L_i = CE_i + lambda * softplus( log sum_{j: y_j != y_i} exp(cos(e_i, e_j) / tau)
                                  - log sum_{j: y_j == y_i} exp(cos(e_i, e_j) / tau) )

(arXiv 2605.08809.) Importing this package imports neither torch nor Megatron; `install()` does.
"""

from __future__ import annotations

from typing import Any

from simreg_megatron.config import SimRegConfig

__version__ = "0.1.0"
__all__ = ["SimRegConfig", "install", "uninstall"]


def install(config: SimRegConfig | None = None, models: Any = None) -> None:
    """Make SimReg part of Megatron in this process.

    Call it once, any time before Megatron parses its flags: the `--simreg-*` flags then decide. In a script that
    never parses Megatron's flags, pass the settings: `install(config=SimRegConfig(lambda_=10))`. Calling it again
    with the same argument changes nothing.

    Args:
        config: the settings, for training loops other than Megatron's own.
        models: what such a loop trains, if it is built already: one model, or the list of model chunks.

    Raises:
        NotImplementedError: SimReg does not reach these models. (A model that it reaches but whose loss passes it by
            is an error in the first training forward pass.)
        MegatronSeamError: this Megatron lacks a function the plugin must wrap; the message names it and the way out.
    """
    from simreg_megatron.plugin import hooks

    hooks.install(config, models)


def uninstall() -> None:
    """Give back every Megatron function that `install()` wrapped."""
    from simreg_megatron.plugin import hooks

    hooks.uninstall()
