# SPDX-License-Identifier: Apache-2.0
"""Labels that say nothing: a control for SimReg, alike in all but what it asks for.

Shapes: b sequences, n tokens, m chunks of k tokens.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from simreg_megatron.losses._chunks import NO_LABEL, chunk_length, fold, unfold


def uninformative_labels(
    labels: Tensor, usable: Tensor, *, kind: str, chunk_size: int, longest: int, seed: int, iteration: int
) -> Tensor:
    """Make labels [b, n] of a control: "permuted" inside each chunk, or "none", which are all different."""
    if kind == "none":
        return torch.where(usable, torch.arange(labels.shape[1], device=labels.device), labels.long())
    return permuted_labels(labels, usable, chunk_size=chunk_size, longest=longest, seed=seed, iteration=iteration)


@torch.no_grad()
def permuted_labels(
    labels: Tensor, usable: Tensor, *, chunk_size: int, longest: int, seed: int, iteration: int
) -> Tensor:
    """Permute the labels [b, n] of the usable tokens inside each chunk, so that no token keeps its own.

    They go round in one cycle through all usable tokens of the chunk, so each chunk has the same labels as before,
    equally often. The cycle is drawn again in each iteration, and depends on positions in the chunk alone: all ranks
    that see a chunk move its labels alike, and a run that is resumed goes on as if it had never stopped. Nothing is
    read on the host.

    Args:
        usable: bool [b, n]; other tokens keep their labels.
        longest: tokens in a chunk at most, the same number on all ranks.
    """
    num_sequences, num_tokens = labels.shape
    length = chunk_length(num_tokens, chunk_size)
    own = fold(labels, length, NO_LABEL)
    takes_part = fold(usable.long(), length, 0) > 0
    draw = random_numbers(longest, seed=seed, iteration=iteration, device=labels.device)[:length]
    order = torch.where(takes_part, draw, math.inf).argsort(dim=-1, stable=True)  # of the cycle; the others behind it
    number, place = takes_part.sum(dim=-1, keepdim=True), torch.arange(length, device=labels.device)
    following = torch.where(place < number, (place + 1) % number.clamp(min=1), place)
    moved = own.scatter(1, order, own.gather(1, order.gather(1, following)))
    return unfold(moved, num_sequences, num_tokens)


def random_numbers(number: int, *, seed: int, iteration: int, device: torch.device) -> Tensor:
    """Draw uniform numbers [number] in [0, 1), the same for equal seeds and iterations on all devices of one kind."""
    generator = seeded_generator(f"placebo {seed} {iteration}", device)
    return torch.rand(number, generator=generator, device=device, dtype=torch.float32)


def seeded_generator(text: str, device: torch.device) -> torch.Generator:
    """Make a generator seeded by a text, with the same numbers on all devices of one kind."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()  # the CPU looks at 32 bits of a seed only
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
