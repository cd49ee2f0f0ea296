# SPDX-License-Identifier: Apache-2.0
"""A corpus for experiments, made from Debian's documentation packages by one recipe, the same on every machine."""
