# SPDX-License-Identifier: Apache-2.0
"""Faults injected into tiny pretraining runs: what is lost, what is said, and whether a run ends with the same bits."""
