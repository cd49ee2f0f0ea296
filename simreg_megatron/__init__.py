# SPDX-License-Identifier: Apache-2.0
"""SimReg for Megatron-LM: pull hidden states of one target token together, push all others apart.

    L_i = CE_i + lambda * softplus( log sum_{j: y_j != y_i} exp(cos(e_i, e_j) / tau)
                                  - log sum_{j: y_j == y_i} exp(cos(e_i, e_j) / tau) )

(arXiv 2605.08809.) Importing this package imports neither torch nor Megatron; `install()` does.
"""

from __future__ import annotations

from simreg_megatron.config import SimRegConfig

__version__ = "0.1.0"
__all__ = ["SimRegConfig", "install", "uninstall"]


def install(config: SimRegConfig | None = None) -> None:
    """Make SimReg part of Megatron in this process.

    Call it once, any time before Megatron parses its flags: the `--simreg-*` flags then decide. In a script that
    never parses Megatron's flags, pass the settings: `install(config=SimRegConfig(lambda_=10))`. Calling it again
    with the same argument changes nothing.

    Raises:
        MegatronSeamError: this Megatron lacks a function the plugin must wrap; the message names it and the way out.
    """
    from simreg_megatron.plugin import hooks

    hooks.install(config)


def uninstall() -> None:
    """Give back every Megatron function that `install()` wrapped."""
    from simreg_megatron.plugin import hooks

    hooks.uninstall()
