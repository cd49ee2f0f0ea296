# SPDX-License-Identifier: Apache-2.0
"""One plugin, many releases of Megatron: `python -m tests.versions` drives each and prints what works where."""
