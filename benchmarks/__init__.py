# SPDX-License-Identifier: Apache-2.0
"""What SimReg costs, in ratios of one run on one machine: `python -m benchmarks`."""
