# SPDX-License-Identifier: Apache-2.0
"""Errors for what training on a CPU cannot do."""


class CpuBackendError(RuntimeError):
    """The CPU backend was asked for where it must not be used."""
