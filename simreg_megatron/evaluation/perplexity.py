# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of a model on a prepared set, as Megatron's validation computes it.

    loss = (1 / N) sum over windows of n + 1 tokens, over their n targets, of -log p(target | window before it)

A window is n + 1 consecutive tokens of the set, documents one after the other with their ends, and the next window
begins at the last one's final token: Megatron's own samples, in the text's order and not in a shuffled one. No target
is masked and attention crosses documents, as in a Megatron run without masks. SimReg is no part of it.

With `features` the logits come from the first so many features of the final states and of the output layer's rows
alone: what a prefix is worth by itself, after a training that asked for useful prefixes (`prefixes=` of the objectives
simreg and mic).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simreg_megatron.data.tokens import open_tokens
from simreg_megatron.evaluation.errors import EvaluationError
from simreg_megatron.evaluation.results import Perplexity

if TYPE_CHECKING:
    from torch import Tensor


def measure(
    model: Path,
    prefix: Path,
    *,
    seq_length: int,
    features: Sequence[int] = (),
    max_tokens: int | None = None,
    batch_size: int = 8,
    dtype: str = "bfloat16",
    device: str | None = None,
) -> list[Perplexity]:
    """The loss of a Hugging Face model folder on PREFIX.bin and .idx: with all features, then with each of `features`.

    Args:
        seq_length: n, targets of a window; the training's, or the numbers do not compare.
        features: numbers of leading features; each is measured in the same pass.
        max_tokens: stop after so many targets; None takes all whole windows.
        dtype: of the weights; the logits and the loss are float32 always.

    Raises:
        EvaluationError: the set holds no window, or ids beyond the model's vocabulary; or more features are asked for
            than there are.
    """
    import torch
    from transformers import AutoModelForCausalLM

    tokens = open_tokens(prefix)
    windows = _count_windows(prefix, len(tokens), seq_length, max_tokens)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    network = network.to(place).eval()
    widths = [network.config.hidden_size, *features]
    if not all(0 < width <= widths[0] for width in widths):
        raise EvaluationError(f"--features: the model has {widths[0]} features, so give numbers from 1 to {widths[0]}")
    head = network.get_output_embeddings().weight
    totals = torch.zeros(len(widths), dtype=torch.float64, device=place)
    with torch.inference_mode():
        for batch in _batches(tokens, windows, seq_length, batch_size, network.config.vocab_size, prefix):
            batch = batch.to(place)
            states = network.model(batch[:, :-1], use_cache=False).last_hidden_state
            targets = batch[:, 1:].flatten()
            for place_of, width in enumerate(widths):
                logits = (states[..., :width] @ head[:, :width].T).float().flatten(0, 1)
                totals[place_of] += torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    count = windows * seq_length
    losses = (totals / count).tolist()
    return [Perplexity(loss, count, seq_length, width) for loss, width in zip(losses, widths, strict=True)]


def _count_windows(prefix: Path, tokens: int, seq_length: int, max_tokens: int | None) -> int:
    windows = (tokens - 1) // seq_length
    if max_tokens is not None:
        windows = min(windows, max(1, max_tokens // seq_length))
    if windows < 1:
        raise EvaluationError(f"{prefix} holds {tokens:,} tokens, less than one sequence of {seq_length} and one")
    return windows


def _batches(
    tokens: Any, windows: int, seq_length: int, batch_size: int, vocab_size: int, prefix: Path
) -> Iterator[Tensor]:
    """Windows [batch, n + 1], in the set's order."""
    import numpy as np
    import torch

    for first in range(0, windows, batch_size):
        starts = range(first * seq_length, min(first + batch_size, windows) * seq_length, seq_length)
        batch = torch.from_numpy(np.stack([tokens[at : at + seq_length + 1] for at in starts]).astype(np.int64))
        if int(batch.max()) >= vocab_size:
            raise EvaluationError(
                f"{prefix} holds token {int(batch.max())} and the model's vocabulary has {vocab_size}: it was made "
                "with another tokenizer"
            )
        yield batch
