# SPDX-License-Identifier: Apache-2.0
"""SimReg's numbers under stress, against float64: no NaN, and errors below a bound that is written down.

python -m tests.stress --small 1000000 --large 200 --record
"""
