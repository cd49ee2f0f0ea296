# SPDX-License-Identifier: Apache-2.0
"""Megatron on a CPU, for trying and testing. Knows nothing of SimReg."""
