# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of a model on a prepared set, as Megatron's validation computes it.

    loss = (1 / N) sum over windows of n + 1 tokens, over their n targets, of -log p(target | window before it)

A window is n + 1 consecutive tokens of the set, documents one after the other with their ends, and the next window
begins at the last one's final token: Megatron's own samples, in the text's order and not in a shuffled one. No target
is masked and attention crosses documents, as in a Megatron run without masks. SimReg is no part of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simreg_megatron.data.tokens import open_tokens
from simreg_megatron.evaluation.errors import EvaluationError
from simreg_megatron.evaluation.results import Perplexity


def measure(
    model: Path,
    prefix: Path,
    *,
    seq_length: int,
    max_tokens: int | None = None,
    batch_size: int = 8,
    dtype: str = "bfloat16",
    device: str | None = None,
) -> Perplexity:
    """The loss of a Hugging Face model folder on PREFIX.bin and .idx.

    Args:
        seq_length: n, targets of a window; the training's, or the numbers do not compare.
        max_tokens: stop after so many targets; None takes all whole windows.
        dtype: of the weights; the logits and the loss are float32 always.

    Raises:
        EvaluationError: the set holds no window, or ids beyond the model's vocabulary.
    """
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    tokens = open_tokens(prefix)
    windows = (len(tokens) - 1) // seq_length
    if max_tokens is not None:
        windows = min(windows, max(1, max_tokens // seq_length))
    if windows < 1:
        raise EvaluationError(f"{prefix} holds {len(tokens):,} tokens, less than one sequence of {seq_length} and one")
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    network = network.to(place).eval()
    total = torch.zeros((), dtype=torch.float64, device=place)
    with torch.inference_mode():
        for first in range(0, windows, batch_size):
            starts = range(first * seq_length, min(first + batch_size, windows) * seq_length, seq_length)
            batch = torch.from_numpy(np.stack([tokens[at : at + seq_length + 1] for at in starts]).astype(np.int64))
            if int(batch.max()) >= network.config.vocab_size:
                raise EvaluationError(
                    f"{prefix} holds token {int(batch.max())} and the model's vocabulary has "
                    f"{network.config.vocab_size}: it was made with another tokenizer"
                )
            batch = batch.to(place)
            logits = network(batch[:, :-1], use_cache=False).logits.float()
            total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
    count = windows * seq_length
    return Perplexity(loss=total.item() / count, tokens=count, seq_length=seq_length)
