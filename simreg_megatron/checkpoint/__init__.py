# SPDX-License-Identifier: Apache-2.0
"""Between Megatron's checkpoints and Hugging Face models, reading both without running anything that is in them."""
