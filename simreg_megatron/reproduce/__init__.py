# SPDX-License-Identifier: Apache-2.0
"""Experiments that are written down before they run: a plan names the question, the arms and the seeds."""
