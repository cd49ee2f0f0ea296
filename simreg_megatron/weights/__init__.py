# SPDX-License-Identifier: Apache-2.0
"""A model's output layer, which terms and the log may ask, and the scalars that objectives add; imports no Megatron."""
