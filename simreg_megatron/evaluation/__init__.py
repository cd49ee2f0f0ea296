# SPDX-License-Identifier: Apache-2.0
"""From Hugging Face models to the paper's table: lm-evaluation-harness zero-shot, perplexity on a prepared set."""
