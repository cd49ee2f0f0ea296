# SPDX-License-Identifier: Apache-2.0
"""The cost of SimReg, in ratios of one run on one machine: `python -m benchmarks`."""
