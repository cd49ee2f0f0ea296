# SPDX-License-Identifier: Apache-2.0
"""What the log says of hidden states: sums of this rank, of all ranks, and their names; knows no Megatron."""
