# SPDX-License-Identifier: Apache-2.0
"""Pretraining as a chain of SLURM jobs."""
