# SPDX-License-Identifier: Apache-2.0
"""Compare an exported model with Megatron's own: logits and perplexity must agree, in fp32 on the CPU."""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from simreg_megatron.checkpoint.errors import CheckpointError
from simreg_megatron.checkpoint.source import Checkpoint
from simreg_megatron.checkpoint.tokenizer import Tokenizer
from simreg_megatron.checkpoint.vocabulary import check_size
from simreg_megatron.checkpoint.weights import EMBEDDING

# What fp32 makes of two orders of the same sums, relative to the spread of the logits.
LOGIT_TOLERANCE = 1e-4
PERPLEXITY_TOLERANCE = 1e-5
_SEQUENCES, _LENGTH = 4, 256
_TEXT = Path(argparse.__file__)  # English and code that every Python has
_TIMEOUT = 3600  # seconds; a large model takes long on a CPU


@dataclass(frozen=True)
class Report:
    """What was compared, and how far apart it was.

    Attributes:
        tokens: how many tokens, in how many sequences.
        text: where they come from.
        difference: the largest absolute difference of two logits.
        spread: the standard deviation of Megatron's logits, which the tolerance is relative to.
        perplexities: Megatron's and the exported model's, over the vocabulary without padding.
    """

    tokens: tuple[int, int]
    text: str
    difference: float
    spread: float
    perplexities: tuple[float, float]

    @property
    def agrees(self) -> bool:
        ours, theirs = self.perplexities
        return self.difference <= LOGIT_TOLERANCE * self.spread and abs(ours - theirs) <= PERPLEXITY_TOLERANCE * ours

    def __str__(self) -> str:
        length, count = self.tokens
        ours, theirs = self.perplexities
        verdict = "agree" if self.agrees else "DIFFER"
        return (
            f"Megatron's GPTModel and the exported model {verdict}: {count} sequences of {length} tokens "
            f"({self.text}), computed in fp32 on the CPU; largest difference of a logit {self.difference:.3g} "
            f"where logits spread by {self.spread:.3g}; perplexity {ours:.7g} and {theirs:.7g}"
        )


def refuse_without_megatron() -> None:
    """Before minutes go into an export. Found as the process that runs Megatron's model will find it.

    Raises:
        CheckpointError: Megatron is not there.
    """
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('megatron.training') is None)"
    if subprocess.run([sys.executable, "-c", look], stderr=subprocess.DEVNULL).returncode:
        raise CheckpointError(
            "--verify runs Megatron's own model, and there is no Megatron here: pip install megatron-core, or name its "
            "source tree in PYTHONPATH, or leave out --verify"
        )


def verify(checkpoint: Checkpoint, model: Path, *, tokenizer: Tokenizer | None = None) -> Report:
    """Compare the model in the folder `model` with Megatron's own, built from the checkpoint.

    Args:
        tokenizer: reads a text for the comparison; without one, tokens are drawn at random.

    Raises:
        CheckpointError: one of the two could not be run.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(str(model), local_files_only=True, trust_remote_code=False)
    # Both are cut to the exported vocabulary below, so a wrong one would agree on the tokens that it kept.
    check_size(checkpoint.args, config.vocab_size, checkpoint.weights[EMBEDDING].shape[0], f"the exported {model}")
    length = min(_LENGTH, config.max_position_embeddings)
    tokens, text = _tokens(length, config.vocab_size, tokenizer)
    rounded = str(config.dtype or torch.float32).removeprefix("torch.")  # as the exported weights are
    reference = _megatron_logits(checkpoint.folder, tokens, rounded, model)[..., : config.vocab_size]
    exported = _exported_logits(model, tokens)
    return compare(reference, exported, tokens, text)


def _tokens(length: int, vocabulary: int, tokenizer: Tokenizer | None) -> tuple[Tensor, str]:
    """[b, n]: text where there is a tokenizer, and enough of it; else any tokens do to tell two functions apart."""
    read = tokenizer.encode(_TEXT.read_text(encoding="utf-8")) if tokenizer else []
    if len(read) >= _SEQUENCES * length:
        return torch.tensor(read[: _SEQUENCES * length]).view(_SEQUENCES, length), "text"
    drawn = torch.randint(vocabulary, (_SEQUENCES, length), generator=torch.Generator().manual_seed(1))
    return drawn, "drawn at random"


def compare(reference: Tensor, exported: Tensor, tokens: Tensor, text: str) -> Report:
    """Logits [b, n, v] of both models for the same tokens [b, n]."""
    return Report(
        tokens=(tokens.shape[1], tokens.shape[0]),
        text=text,
        difference=(reference - exported).abs().max().item(),
        spread=reference.double().std().item(),
        perplexities=(_perplexity(reference, tokens), _perplexity(exported, tokens)),
    )


def _perplexity(logits: Tensor, tokens: Tensor) -> float:
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), tokens[:, 1:].flatten())
    return math.exp(losses.item())


def _megatron_logits(folder: Path, tokens: Tensor, dtype: str, model: Path) -> Tensor:
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as scratch:
        given, found = Path(scratch, "tokens.safetensors"), Path(scratch, "logits.safetensors")
        save_file({"tokens": tokens.contiguous()}, str(given))
        command = [sys.executable, "-m", "simreg_megatron.checkpoint.megatron_logits"]
        try:
            done = subprocess.run(
                [*command, str(folder), str(given), str(found), dtype],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
                text=True,
                timeout=_TIMEOUT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        except subprocess.TimeoutExpired:
            raise CheckpointError(
                f"Megatron's own model took more than {_TIMEOUT} s for the comparison, so there was none: {model} is "
                "whole and was not compared; verify on a faster machine"
            ) from None
        if done.returncode:
            last = (done.stdout.strip().splitlines() or ["no word of it"])[-1]
            raise CheckpointError(f"Megatron's own model could not be run for the comparison: {last}")
        return load_file(str(found))["logits"]


@torch.no_grad()
def _exported_logits(folder: Path, tokens: Tensor) -> Tensor:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(folder), local_files_only=True, use_safetensors=True, attn_implementation="eager", trust_remote_code=False
    )
    model = model.float().eval()
    return torch.cat([model(sequence[None], use_cache=False).logits.float() for sequence in tokens])
