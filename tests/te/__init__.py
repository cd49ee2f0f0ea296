# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's and Megatron-Bridge's own packages on a machine without a GPU; `make test-te` runs these."""
