# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of a model on a prepared set, as Megatron's validation computes it.

    loss = (1 / N) sum over windows of n + 1 tokens, over their n targets, of -log p(target | window before it)

A window is n + 1 consecutive tokens of the set, documents one after the other with their ends, and the next window
begins at the last one's final token: Megatron's own samples, in the text's order and not in a shuffled one. No target
is masked and attention crosses documents, as in a Megatron run without masks. SimReg is no part of it.

Bits per byte are that loss over ln 2 and over the bytes of the same text, which do not depend on the tokenizer:

    bits per byte = loss * tokens / (bytes * ln 2)

With `features` the logits come from the first so many features of the final states and of the output layer's rows
alone: what a prefix is worth by itself, after a training that asked for useful prefixes (`prefixes=` of the objectives
simreg and mic).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from simreg_megatron.data.assemble import MANIFEST
from simreg_megatron.data.check import manifest_of
from simreg_megatron.data.encoding import SENTENCEPIECE, describe_tokenizer
from simreg_megatron.data.indexed import DataError
from simreg_megatron.data.settings import section
from simreg_megatron.data.tokens import document_lengths, open_tokens
from simreg_megatron.evaluation import paired
from simreg_megatron.evaluation.errors import EvaluationError
from simreg_megatron.evaluation.results import Perplexity

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn


class Measured(NamedTuple):
    """The losses, of all features first; and by the names of `paired` the sums over each document, of all features."""

    losses: list[Perplexity]
    documents: dict[str, np.ndarray]


def refuse_unfit(
    model: Path, prefix: Path, *, seq_length: int, features: Sequence[int] = (), max_tokens: int | None = None
) -> list[str]:
    """What can be told before a model is loaded.

    Returns:
        A line for the user where nothing shows that the set was made with the model's tokenizer.

    Raises:
        EvaluationError: the set holds no window, or was made with another tokenizer; or more features are asked for
            than there are.
    """
    from transformers import AutoConfig

    _count_windows(prefix, len(open_tokens(prefix)), seq_length, max_tokens)
    width = AutoConfig.from_pretrained(model, trust_remote_code=False).hidden_size if features else 0
    if not all(0 < number <= width for number in features):
        raise EvaluationError(f"--features: the model has {width} features, so give numbers from 1 to {width}")
    return _told_of_tokenizer(model, prefix)


def _told_of_tokenizer(model: Path, prefix: Path) -> list[str]:
    """Hashes compare within a kind: sentencepiece's are of the file, those of Hugging Face of what a tokenizer does."""
    made = manifest_of(Path(f"{prefix}.bin")) or {}
    known = made.get("tokenizer_sha256")
    settings = section(section(made, "settings", prefix), "tokenizer", prefix)
    kind = settings.get("kind", SENTENCEPIECE)  # the built-in corpus names none
    there = []
    for source in (model, model / "tokenizer.model"):
        with suppress(DataError):  # there is none, or it ends no text
            there.append(describe_tokenizer(str(source)))
    if known in [facts.sha256 for facts in there]:
        return []
    if known is not None and kind in [facts.kind for facts in there]:
        name = made.get("tokenizer_name")
        raise EvaluationError(
            f"{prefix} was made with another tokenizer{f' ({name})' if name else ''} than the one in {model} "
            f"({MANIFEST} beside it tells): give a set that was made with the model's own"
        )
    return [f"nothing shows whether {prefix} was made with the tokenizer of {model}: with another one, its losses mean "
            "nothing"]  # fmt: skip


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
) -> Measured:
    """The loss of a Hugging Face model folder on PREFIX.bin and .idx: with all features, then with each of `features`.

    Args:
        seq_length: n, targets of a window; the training's, or the numbers do not compare.
        features: numbers of leading features; each is measured in the same pass.
        max_tokens: stop after so many targets; None takes all whole windows.
        dtype: of the weights; the logits and the loss are float32 always.

    Raises:
        EvaluationError: the set does not fit the model: what `refuse_unfit` finds, and ids beyond its vocabulary.
    """
    import torch
    from transformers import AutoModelForCausalLM

    refuse_unfit(model, prefix, seq_length=seq_length, features=features, max_tokens=max_tokens)
    tokens = open_tokens(prefix)
    windows = _count_windows(prefix, len(tokens), seq_length, max_tokens)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    network: Any = AutoModelForCausalLM.from_pretrained(
        model, dtype=getattr(torch, dtype), use_safetensors=True, trust_remote_code=False
    )
    network = network.to(place).eval()
    _refuse_longer_than_positions(network, seq_length)
    widths = [network.config.hidden_size, *features]
    head = network.get_output_embeddings().weight
    totals = torch.zeros(len(widths), dtype=torch.float64, device=place)
    documents = _Documents(prefix, windows * seq_length)
    with torch.inference_mode():
        batches = _batches(tokens, windows, seq_length, batch_size, network.config.vocab_size, prefix)
        for number, batch in enumerate(batches):
            batch = batch.to(place)
            found = network(batch[:, :-1], use_cache=False, output_hidden_states=bool(features))
            if features and number == 0:  # it is a product as large as the head's, and waits for the device
                _refuse_other_heads(found.hidden_states[-1] @ head.T, found.logits)
            targets = batch[:, 1:].flatten()
            for place_of, width in enumerate(widths):
                # The model's own logits may be more than a product with its output layer: scaled, capped, with a bias.
                logits = found.logits if place_of == 0 else found.hidden_states[-1][..., :width] @ head[:, :width].T
                logits = logits.float().flatten(0, 1)
                losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
                totals[place_of] += losses.sum(dtype=torch.float64)
                if place_of == 0:
                    documents.add(losses.double().cpu().numpy())
    count = windows * seq_length
    sums = documents.sums(tokens, model)
    size = int(sums[paired.BYTES].sum()) if paired.BYTES in sums else None
    means = zip((totals / count).tolist(), widths, strict=True)
    return Measured([Perplexity(loss, count, seq_length, width, size) for loss, width in means], sums)


def _refuse_longer_than_positions(network: nn.Module, seq_length: int) -> None:
    """Rotary positions have no end; of a table, what lies past the end is an error on a CPU and worse on a GPU."""
    for name, module in network.named_modules():
        if name.endswith(("wpe", "embed_positions", "position_embeddings")):
            positions = getattr(module, "num_embeddings", seq_length)
            if positions < seq_length:
                raise EvaluationError(
                    f"--seq-length {seq_length}: the model has {positions} positions, so give at most that"
                )


def _refuse_other_heads(product: Tensor, logits: Tensor) -> None:
    """A prefix of the features has no logits where these are not the product of final states and output layer."""
    if (product - logits).abs().max() > 0.05 * logits.abs().max():
        raise EvaluationError(
            "--features: this model's logits are not its final states times its output layer alone (they are scaled, "
            "capped or shifted), so a prefix of its features has none: leave --features out"
        )


class _Documents:
    """Sums over the targets of each document: tokens 1 to `count` of the set, in order."""

    def __init__(self, prefix: Path, count: int) -> None:
        import numpy as np

        ends = np.cumsum(document_lengths(prefix), dtype=np.int64)
        self._edges = np.unique(np.clip(np.concatenate([[1], ends, [count + 1]]), 1, count + 1))
        self._losses = np.zeros(len(self._edges) - 1)
        self._next = 1

    def add(self, losses: np.ndarray) -> None:
        """Of the next targets."""
        import numpy as np

        places = np.arange(self._next, self._next + len(losses))
        owners = np.searchsorted(self._edges, places, side="right") - 1
        self._losses += np.bincount(owners, weights=losses, minlength=len(self._losses))
        self._next += len(losses)

    def sums(self, tokens: Any, model: Path) -> dict[str, np.ndarray]:
        import numpy as np

        found = {paired.LOSS: self._losses, paired.TOKENS: np.diff(self._edges).astype(np.float64)}
        spans = zip(self._edges[:-1], self._edges[1:], strict=True)
        sizes = _bytes_of(model, (tokens[start:end].astype(np.int64).tolist() for start, end in spans))
        return found if sizes is None else {**found, paired.BYTES: np.array(sizes, dtype=np.float64)}


def _bytes_of(model: Path, texts: Iterable[list[int]]) -> list[int] | None:
    """UTF-8 bytes of each, as it was written; None without a tokenizer beside the model."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError, TypeError):  # the last one of release 4, where a file is missing
        return None
    as_written = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    return [len(str(tokenizer.decode(ids, **as_written)).encode()) for ids in texts]


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
