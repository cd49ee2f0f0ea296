# SPDX-License-Identifier: Apache-2.0
"""One rank's terms of sequences that several ranks share; knows torch, and no Megatron."""
