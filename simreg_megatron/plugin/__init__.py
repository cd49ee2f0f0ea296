# SPDX-License-Identifier: Apache-2.0
"""The part that depends on Megatron: the flags, the functions of Megatron that are wrapped, the log, AdaGC."""
