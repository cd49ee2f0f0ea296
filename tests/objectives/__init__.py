# SPDX-License-Identifier: Apache-2.0
"""What every objective must keep, generated from its record: `pytest tests/objectives --objective NAME` for one."""
