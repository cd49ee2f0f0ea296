# SPDX-License-Identifier: Apache-2.0
"""Tests of every objective, generated from its record: `pytest tests/objectives --objective NAME` for one."""
