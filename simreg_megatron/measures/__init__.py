# SPDX-License-Identifier: Apache-2.0
"""Statistics of hidden states for the log: sums of this rank, of all ranks, and their names. Needs no Megatron."""
