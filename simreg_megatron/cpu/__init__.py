# SPDX-License-Identifier: Apache-2.0
"""Megatron on a CPU, for trying and testing. Knows nothing of SimReg."""


class CpuBackendError(RuntimeError):
    """The CPU backend was asked for where it must not be used."""
